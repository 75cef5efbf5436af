"""The loader against common alternatives and a lower bound, interleaved in one run on the same images.

    python benchmarks/loader.py --images FOLDER [--rounds 5] [--only ours,pillow] [--json FILE]
        [--timm FOLDER] [--peers FOLDER [--install]] [--parts]

FOLDER is a tree <class>/*.JPEG. Every contestant is a separate process (loader_peers.py). A turn is a number of batches;
between turns a contestant idles with full queues. The order rotates from round to round. The metric is CPU time per image (user
and system, of the process and all its children), which, unlike images/s, hardly depends on the load of the machine. The goals
are ratios of its medians.

``--parts`` adds the parts of our loader, each measured alone (loader_parts.py).

Contestants that are not installed are skipped and listed. ``--peers`` names a folder of virtual environments, one for each set of packages
that go together, and ``--install`` makes those that are missing; FFCV's is described in docs/results/loader.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from loader_data import Form, prepare
from loader_process import ContestantProcess, Turn, peer_environment, start_limit, start_peer
from loader_report import Goal, Row, print_parts, print_report, write_json
from loader_settings import Settings, StoredImages, Unavailable
from tqdm import tqdm

from pipeline.command_line import run_command
from pipeline.errors import UserError
from pipeline.files import check_writable

QUEUE = 8  # upper bound of the batches that a contestant prefetches


@dataclass(frozen=True)
class Contestant:
    """A row of the table.

    Attributes:
        name: how the report calls it.
        peer: its name in loader_peers.py; None: the libjpeg-turbo limit.
        form: how the images that it reads are stored.
        what: a description for the table.
        environment: the virtual environment, in the folder ``--peers``, that has its packages.
    """

    name: str
    peer: str | None
    form: Form
    what: str
    environment: str | None = None

    @property
    def reference(self) -> str:
        """Whose CPU time is 1 in this one's table: crop-flip and full recipe are compared apart."""
        return "ours_full" if self.name.endswith("_full") else "ours"

    @property
    def limit(self) -> str:
        """The limit on the images that this contestant reads."""
        return next(other.name for other in CONTESTANTS if other.peer is None and other.form is self.form)


CONTESTANTS = [
    Contestant("limit", None, Form.ORIGINALS, "libjpeg-turbo decodes the crops, nothing else"),
    Contestant("ours", "ours", Form.ORIGINALS, "this loader, bicubic"),
    Contestant("dali_native", "dali_native", Form.ORIGINALS, "DALI readers.webdataset, bicubic"),
    Contestant("dali_native_linear", "dali_native_linear", Form.ORIGINALS, "DALI readers.webdataset, linear"),
    Contestant("opencv", "opencv", Form.ORIGINALS, "OpenCV in threads, cubic, no antialiasing", "threads"),
    Contestant("opencv_area", "opencv_area", Form.ORIGINALS, "OpenCV in threads, area", "threads"),
    Contestant("simplejpeg", "simplejpeg", Form.ORIGINALS, "simplejpeg at reduced size + OpenCV in threads, cubic", "threads"),
    Contestant("spdl", "spdl", Form.ORIGINALS, "SPDL's pipeline, FFmpeg, bicubic", "threads"),
    Contestant(
        "torchvision", "torchvision", Form.ORIGINALS, "torchvision's decoder and v2 + DataLoader, bicubic", "torchvision"
    ),
    Contestant("timm", "timm", Form.ORIGINALS, "timm's create_loader, bicubic", "torchvision"),
    Contestant("pillow", "pillow", Form.ORIGINALS, "Pillow + torch DataLoader, bicubic"),
    Contestant("webdataset", "webdataset", Form.ORIGINALS, "webdataset + Pillow, bicubic", "streams"),
    Contestant("litdata", "litdata", Form.ORIGINALS, "LitData + Pillow, bicubic", "streams"),
    Contestant("streaming", "streaming", Form.ORIGINALS, "MosaicML streaming + Pillow, bicubic", "torchvision"),
    Contestant("limit_500", None, Form.LONG_SIDE_500, "libjpeg-turbo, long side at most 500 px"),
    Contestant("ours_500", "ours", Form.LONG_SIDE_500, "this loader, long side at most 500 px"),
    Contestant("ffcv", "ffcv", Form.LONG_SIDE_500, "FFCV JPEG mode, the same JPEGs, area", "ffcv"),
    Contestant("limit_256", None, Form.SHORT_SIDE_256, "libjpeg-turbo, short side 256 px"),
    Contestant("ours_256", "ours", Form.SHORT_SIDE_256, "this loader, short side 256 px"),
    Contestant("ours_full", "ours_full", Form.ORIGINALS, "this loader, full recipe"),
    Contestant("pillow_full", "pillow_full", Form.ORIGINALS, "Pillow + DataLoader, full recipe by timm"),
]

ENVIRONMENTS = {  # name -> its packages beside PyTorch
    "threads": "spdl==0.8.0 opencv-python-headless==5.0.0.93 simplejpeg==1.9.0",
    "streams": "webdataset==1.0.2 litdata==0.2.76",
    "torchvision": "torchvision==0.28.0 timm==1.0.31 mosaicml-streaming==0.13.0",
}

GOALS = [
    Goal("crop-flip against the limit", "ours", "limit", 1.45),
    Goal("full recipe against the limit", "ours_full", "limit", 2.5),
    Goal("short side 256 against the limit on it", "ours_256", "limit_256", 2.0),
    Goal("crop-flip against Pillow + DataLoader", "ours", "pillow", 0.45),
    Goal("crop-flip against DALI's own reader at bicubic", "ours", "dali_native", 0.6),
    Goal("crop-flip against FFCV's JPEG mode on the same JPEGs", "ours_500", "ffcv", 0.9),
    Goal("full recipe against Pillow + timm", "ours_full", "pillow_full", 0.6),
    Goal("short side 256 against Pillow on originals", "ours_256", "pillow", 0.3),
]


def python_of(environment: str | None, peers: Path | None) -> str:
    """The interpreter of an environment in the folder ``--peers``; this one's where there is none."""
    python = peers / environment / "bin" / "python" if peers and environment else None
    return str(python) if python and python.exists() else sys.executable


def install(peers: Path) -> None:
    """Make the environments that are missing in a folder; one that cannot be made is left out with a warning."""
    for name, packages in ENVIRONMENTS.items():
        if (peers / name).exists():
            continue
        print(f"installing {peers / name}: {packages}", flush=True)
        made = [sys.executable, "-m", "venv", peers / name]
        filled = [
            peers / name / "bin" / "pip",
            "install",
            "--quiet",
            f"torch=={version('torch').partition('+')[0]}",
            "numpy",
            "pillow",
        ]
        # torchvision's operators load beside PyPI's PyTorch alone; pip's settings may name a build without CUDA.
        variables = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""} if "torchvision" in packages else {}
        for command in (made, [*filled, *packages.split()]):
            if (done := subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)).returncode:
                print(f"warning: {peers / name} cannot be installed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                shutil.rmtree(peers / name, ignore_errors=True)
                break


def start_all(
    contestants: list[Contestant], stored: dict[Form, StoredImages], work: Path, args: argparse.Namespace
) -> tuple[dict[str, ContestantProcess], dict[str, str]]:
    """Start the contestants one after the other, each left alone until it rests.

    Returns:
        The processes by name, and the reasons of those that cannot run here.
    """
    processes, skipped = {}, {}
    for contestant in tqdm(contestants, desc="starting", disable=None):
        settings = Settings(stored[contestant.form], args.workers, args.batch_size, args.timm)
        log = work / f"{contestant.name}.log"
        try:
            if contestant.peer is None:
                process = start_limit(settings, log)
            else:
                python = python_of(contestant.environment, args.peers)
                process = start_peer(contestant.peer, python, settings, log)
            processes[contestant.name] = process
        except Unavailable as error:
            skipped[contestant.name] = str(error)
    return processes, skipped


def measure(processes: dict[str, ContestantProcess], rounds: int, batches: int) -> dict[str, list[Turn]]:
    """A warm-up turn for everyone, then ``rounds`` turns each; who begins changes from round to round."""
    names = list(processes)
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for name in tqdm(names, desc="warming up", disable=None):
        processes[name].turn(batches, QUEUE)
    progress = tqdm(total=rounds * len(names), desc="measuring", disable=None)
    for round_ in range(rounds):
        first = round_ * len(names) // rounds
        for name in names[first:] + names[:first]:
            turns[name].append(processes[name].turn(batches, QUEUE))
            progress.update()
    progress.close()
    return turns


def measure_parts(
    contestants: list[Contestant], stored: dict[Form, StoredImages], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """The parts of our loader for each form of it among the contestants: CPU milliseconds per image."""
    parts = {}
    for contestant in contestants:
        if contestant.peer not in ("ours", "ours_full"):
            continue
        command = [sys.executable, Path(__file__).with_name("loader_parts.py"), "--shards", stored[contestant.form].shards]
        command += ["--workers", str(args.workers), "--batch-size", str(args.batch_size), "--rounds", str(args.rounds)]
        command += ["--full"] if contestant.peer == "ours_full" else []
        environment = {**os.environ, **peer_environment(args.workers)}
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        if result.returncode:
            raise UserError(f"the parts of {contestant.name} cannot be measured", result.stderr.strip().splitlines()[-1])
        lines = (line.split("\t") for line in result.stdout.splitlines())
        parts[contestant.name] = {part: float(milliseconds) for part, milliseconds in lines}
    return parts


def selected(only: str | None) -> list[Contestant]:
    """The contestants that ``--only`` names, all without it.

    Raises:
        UserError: a name that nobody has.
    """
    if only is None:
        return CONTESTANTS
    known = [contestant.name for contestant in CONTESTANTS]
    for name in only.split(","):
        if name not in known:
            raise UserError(f"--only must name some of {', '.join(known)}, got {name!r}", "correct the name")
    return [contestant for contestant in CONTESTANTS if contestant.name in only.split(",")]


def check_positive(args: argparse.Namespace, options: Iterable[str]) -> None:
    """Refuse a number below 1 under any of these options."""
    for option in options:
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise UserError(f"--{name} must be at least 1, got {getattr(args, option)}", "pass a positive number")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder <class>/*.JPEG")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: 5)")
    parser.add_argument("--batches", type=int, default=24, help=f"batches per turn, the first {QUEUE} untimed (default: 24)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: 64)")
    parser.add_argument("--workers", type=int, default=2, help="threads or processes that decode (default: 2)")
    parser.add_argument("--only", help="names of contestants, comma-separated (default: all)")
    parser.add_argument("--timm", type=Path, help="folder that holds the package timm (pip install --no-deps --target)")
    parser.add_argument("--peers", type=Path, help="folder with the virtual environments of the peers")
    parser.add_argument("--install", action="store_true", help="make those that are missing there")
    parser.add_argument("--parts", action="store_true", help="also measure the parts of our loader, each alone")
    parser.add_argument("--json", type=Path, help="also write every turn's figures to this file")
    args = parser.parse_args()
    check_positive(args, ("rounds", "batches", "batch_size", "workers"))
    if args.batches <= QUEUE:
        raise UserError(f"--batches must be above {QUEUE}, as the first are untimed, got {args.batches}", "pass 24")
    if args.json:
        check_writable(args.json)
    contestants = selected(args.only)
    if args.install:
        if not args.peers:
            raise UserError("--install requires --peers", "add --peers FOLDER")
        install(args.peers)

    with tempfile.TemporaryDirectory(prefix="loader-benchmark-") as folder:
        stored = prepare(args.images, Path(folder), {contestant.form for contestant in contestants}, args.workers)
        processes, skipped = start_all(contestants, stored, Path(folder), args)
        try:
            turns = measure(processes, args.rounds, args.batches)
        finally:
            for process in processes.values():
                process.close()
        parts = measure_parts(contestants, stored, args) if args.parts else {}
    images = args.batches * args.batch_size
    timed = images - QUEUE * args.batch_size
    rows = [
        Row(c.name, c.what, c.reference, c.limit, skipped.get(c.name), *_figures(turns.get(c.name, []), images, timed))
        for c in contestants
    ]
    settings = f"{args.rounds} rounds of {images} images, {args.workers} workers, batch {args.batch_size}"
    print_report(rows, GOALS, f"{settings}, {os.cpu_count()} cores")
    if args.parts:
        print_parts(parts, rows)
    if args.json:
        write_json(args.json, rows, GOALS, settings)


def _figures(turns: list[Turn], images: int, timed: int) -> tuple[list[float], list[float]]:
    """(images per second, CPU milliseconds per image), a value per turn."""
    return [timed / turn.wall for turn in turns], [1000 * turn.cpu / images for turn in turns]


if __name__ == "__main__":
    run_command(main)
