"""Make docs/results/gpu.md, the table of all records in benchmarks/gpu_ledger.

python -m benchmarks.gpu_table > docs/results/gpu.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import FORMAT
from benchmarks.gpu.report import header, line, shown
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError

LEDGER = Path(__file__).parent / "gpu_ledger"
_PAGE = """# GPUs

`make gpu-check` measures this code on the GPUs of a machine, without network, the most valuable first: after 5 minutes there are the
steps of PerViT-M, -T and -S, after 25 nearly all. It prints each figure when it is there, and tables at the end or when it is stopped.

```bash
make gpu-check
make gpu-check MINUTES=5
make gpu-check GPU_OPTIONS="--only step,attention"
```

Each case is a process of its own, so that what crashes, hangs or lacks memory is a row with its reason. `gpu-check.json` is a record of
all rows: [how to send it](../../benchmarks/gpu_ledger/README.md), and what its fields are. Below are the records that were sent, steps
without the loader (`python -m benchmarks.gpu_table`).

## Training steps

{steps}
"""
_COLUMNS = ("ms", "images_per_second", "mfu", "gpu_busy_ms", "launches", "synchronisations")


def main() -> None:
    parser = command_parser("benchmarks.gpu_table", __doc__)
    parser.add_argument("--ledger", type=Path, default=LEDGER, metavar="DIR", help=argparse.SUPPRESS)
    print(page(records(parser.parse_args().ledger)), end="")


def records(ledger: Path) -> list[dict[str, Any]]:
    """All records of a folder, by GPU and date.

    Raises:
        UserError: one is not of this format.
    """
    found = []
    for path in sorted(ledger.glob("*.json")):
        try:
            record = json.loads(path.read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']}")
            [(row["stage"], row["case"]) for row in record["rows"]]
            found.append(((record["gpu"]["name"], record["gpu"]["count"], record["date"]), record))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} must be a record of format {FORMAT}, got {error!r}", "see README.md beside it") from None
    return [record for _, record in sorted(found, key=lambda each: each[0])]


def page(found: list[dict[str, Any]]) -> str:
    """The page as Markdown."""
    titles = [
        "GPU",
        "model",
        "batch",
        "compile",
        "ZeRO",
        "processes",
        *(name.replace("_", " ") for name in _COLUMNS),
        "measured",
    ]
    lines = [*header(titles), *(line(cells) for record in found for cells in steps(record))]
    return _PAGE.format(steps="\n".join(lines) if len(lines) > 2 else "No record has been sent yet.")


def steps(record: dict[str, Any]) -> Iterator[list[str]]:
    """Cells of the rows of steps in memory, by model and what was set."""
    told = ("model", "micro_batch", "compile", "zero_stage", "world_size")
    rows = [row for row in record["rows"] if row["stage"] == "step" and row["source"] == "memory" and row.get("ms")]
    for row in sorted(rows, key=lambda row: [row[name] for name in told]):
        when = f"{record['date'][:10]}, {record['commit']}"
        settings = [record["gpu"]["name"], *(str(row[name]) for name in told)]
        yield [*settings, *(shown(name, row.get(name)) for name in _COLUMNS), when]


if __name__ == "__main__":
    run_command(main)
