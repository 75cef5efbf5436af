"""What a training step asks of a GPU, counted on a pretended one: launches, copies, synchronisations, NCCL calls, the host's time.

    python -m benchmarks.launches [--models pervit_t,pervit_s,pervit_m] [--ranks 1,8] [--compile off,blocks,model,graphs]
    python -m benchmarks.launches --quick

PyPI's CUDA build of PyTorch and a C++ compiler are needed, a GPU is not: ``tests/pretended_gpu``. Steps are those of the real loop on
128 random images per rank, bf16, without activation checkpointing; several ranks are one process that believes so, on which ZeRO
0, 1 and 2 are counted. A row is added to ``--output`` as soon as it is there; those of other commits are kept.

- launches: kernels, products, convolutions and memsets that the CPU starts; a CUDA graph is one
- convolutions: of the launches, those of cuDNN, each of which may be several kernels
- in graphs: what CUDA graphs start on the GPU without the CPU
- copies: between and on the devices
- synchronisations: how often the CPU waits for the GPU
- NCCL: collectives
- host: CPU milliseconds of all threads of the process, the counting included: to be compared on one machine
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.command_line import run_command
from pipeline.errors import UserError

REPOSITORY = Path(__file__).parents[1]
PROGRAM = REPOSITORY / "tests" / "pretended_gpu" / "run.py"
KINDS = "off,blocks,model,graphs"
STAGES = {1: "0"}  # by ranks: one has nobody to share with
_STAGES = "0,1,2"
_COLUMNS = {
    "model": "model", "ranks": "ranks", "zero": "ZeRO", "compile": "compile", "launches": "launches", "convolutions": "convolutions",
    "in graphs": "in graphs", "copies": "copies", "synchronisations": "synchronisations", "collectives": "NCCL", "host ms": "host, ms",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="pervit_t,pervit_s,pervit_m", help="default: %(default)s")
    parser.add_argument("--ranks", default="1,8", help="default: %(default)s")
    parser.add_argument("--compile", default=KINDS, help="values of train.compile; default: %(default)s")
    parser.add_argument("--output", type=Path, help="a CSV file that gets the rows too")
    parser.add_argument("--quick", action="store_true", help="one model, nothing compiled: a minute or two")
    args = parser.parse_args()
    models, kinds = args.models.split(","), args.compile.split(",")
    if args.quick:
        models, kinds = models[:1], ["off"]
    if any(not each.isdigit() or int(each) < 1 for each in args.ranks.split(",")):
        raise UserError(f"--ranks must be numbers of at least 1, got {args.ranks}", "pass for example --ranks 1,8")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
    ).stdout.strip()
    print(f"| {' | '.join(_COLUMNS.values())} |\n|{'---|' * len(_COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as cache:  # what is compiled for one case serves the next
        for model in models:
            for kind in kinds:
                for ranks in map(int, args.ranks.split(",")):
                    for row in cases(model, ranks, kind, Path(cache)):
                        print(
                            f"| {' | '.join(f'{row[name]:g}' if name != 'model' and name != 'compile' else row[name] for name in _COLUMNS)} |",
                            flush=True,
                        )
                        if args.output:
                            add(args.output, {"commit": commit, **row})


def cases(model: str, ranks: int, kind: str, cache: Path) -> Iterator[dict]:
    """Rows of one process, each as soon as it is there.

    Raises:
        UserError: the process failed.
    """
    command = [sys.executable, str(PROGRAM), "-m", "pretended_gpu.steps", "--model", model, "--ranks", str(ranks)]
    command += ["--zero", STAGES.get(ranks, _STAGES), "--compile", kind]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PERVIT_QUIET": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait() != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"{model} on {ranks} ranks with train.compile={kind} ended with {process.returncode}: {last}",
                "run it alone: " + " ".join(command[1:]),
            )


def add(path: Path, row: dict) -> None:
    """Add a row, with a head where there is no file yet."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [name for name in row], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    run_command(main)
