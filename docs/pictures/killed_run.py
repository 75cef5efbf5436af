"""Draw the README's picture: a run on two processes, of which one is killed, and the same command again.

    python docs/pictures/killed_run.py --shards demo/shards          # of `make demo`; it takes about two minutes on two cores

Everything in it is what the commands printed; left out are the time stamps, lines in between, and what does not fit the width.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PICTURE = Path(__file__).with_suffix(".svg")
COLUMNS = 58
COMMAND = "bash launch/local.sh 2 -- pipeline.train --config demo"
OPTIONS = "checkpoint.every_steps=10 log.every_steps=1"
KILLED_AT, STOPPED_AT = 26, 28
COLOURS = {"$": "#7ee787", "#": "#ff7b72", ">": "#79c0ff", " ": "#c9d1d9"}
REPEATED = "#e3b341"  # losses of the steps that are repeated


def rank_of(pid: int) -> str:
    """The RANK of a process, from its environment; empty if it has none."""
    try:
        return dict(e.split("=", 1) for e in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in e).get("RANK", "")
    except OSError:
        return ""


def train(folder: Path, stop_at: int, signal_number: int) -> list[str]:
    """Run the command in a folder until a step is logged, then send rank 1 a signal; the lines of the log."""
    script, *words = COMMAND.split()[1:]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "200", "NO_COLOR": "1"}
    run = subprocess.Popen(
        ["bash", REPOSITORY / script, *words, *OPTIONS.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert run.stdout
    lines, sent = [], False
    for line in run.stdout:
        lines.append(re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line.rstrip()))
        if not sent and f"step {stop_at}/" in line:
            members = (int(p.name) for p in Path("/proc").glob("[0-9]*") if p.stat().st_uid == os.getuid())
            (victim,) = (p for p in members if rank_of(p) == "1" and os.getsid(p) == os.getsid(run.pid) and is_python(p))
            os.kill(victim, signal_number)
            sent = True
    run.wait()
    return lines


def is_python(pid: int) -> bool:
    return "python" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]


def shown(lines: list[str], steps: range) -> list[str]:
    """The lines of a start that the picture has: some steps, and what is said of the loss of a process and of the resume."""
    kept = []
    for line in lines:
        if step := re.match(r"step (\d+)/\S+ epoch \S+ loss \S+", line):
            speed = re.search(r"[\d.,]+ images/s", line)
            if int(step[1]) in steps:
                kept.append(f" {step[0]}{'  ' + speed[0] if speed else ''}")
        elif re.search(r"rank 1|resuming", line):
            kept.append(">" + (line if len(line) <= COLUMNS else line[: COLUMNS - 1].rstrip() + "…"))
    return kept


def losses(rows: list[str]) -> list[str]:
    return re.findall(r"step \d+/\S+ epoch \S+ (loss \S+)", "\n".join(rows))


def draw(rows: list[str], repeated: set[str]) -> str:
    """An SVG of a terminal; the first character of a row is its colour."""
    width, height = COLUMNS * 8 + 32, len(rows) * 20 + 46
    texts = []
    for i, row in enumerate(rows):
        text = escape(row[1:]).replace(" ", "&#160;")
        for loss in repeated & set(re.findall(r"loss \S+", row)):
            name, value = loss.split()
            text = text.replace(f"{name}&#160;{value}", f'{name}&#160;<tspan fill="{REPEATED}">{value}</tspan>')
        length = f' textLength="{8 * len(row[1:])}" lengthAdjust="spacingAndGlyphs"' if row[1:].strip() else ""
        texts.append(f'<text x="16" y="{52 + 20 * i}" fill="{COLOURS[row[0]]}"{length}>{text}</text>')
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="18" r="5" fill="{c}"/>' for i, c in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    fonts = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>{dots}\n'
        f'<g font-family="{fonts}" font-size="13.3">\n' + "\n".join(texts) + "\n</g>\n</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="shards of the demo's digits")
    shards = parser.parse_args().shards.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "demo").mkdir()
        (folder / "demo" / "shards").symlink_to(shards)
        first = shown(train(folder, KILLED_AT, signal.SIGKILL), range(20, KILLED_AT + 1))
        second = shown(train(folder, STOPPED_AT, signal.SIGTERM), range(20, STOPPED_AT + 1))
    last = max(i for i, row in enumerate(first) if "step" in row) + 1
    rows = ["$$ " + COMMAND + " \\", "$      " + OPTIONS, *first[:last], "## kill -9 of rank 1", *first[last:], " "]
    rows += ["$$ " + COMMAND + " \\", "$      " + OPTIONS, *second]
    PICTURE.write_text(draw(rows, set(losses(first)) & set(losses(second))))
    print("\n".join(row[1:] for row in rows))


if __name__ == "__main__":
    main()
