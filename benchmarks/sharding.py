"""Writing a data set: this sharder against webdataset.ShardWriter, LitData's optimize, plain cp, and decoding alone.

    python benchmarks/sharding.py --images DIR [--output DIR] [--copies 20] [--rounds 5]

DIR holds <class>/*.JPEG; symbolic links repeat it until it takes seconds to write. Each contestant is a fresh process that
reads the same files from the page cache. The clock stops when all output is on the disk (fsync). Each also writes a small set,
and the figures are the difference of the two, which excludes imports and the start of workers. Medians of interleaved rounds;
CPU times are listed too because they depend less on the load of the machine.

Peers that are not installed are skipped: pip install webdataset==1.0.2 litdata==0.2.76 simplejpeg==1.9.0
ShardWriter and cp have no workers and use one process; all others use two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

WORKERS = 2
SAMPLES_PER_SHARD = 500
SMALL_COPIES = 2  # of the images: enough for every worker to have a shard
GOALS = (  # contestant, share of, at least
    ("sharder, images checked", "libjpeg-turbo decodes, writes nothing", 0.8),
    ("sharder, --no-check", "webdataset.ShardWriter", 1.5),
    ("sharder, --no-check", "LitData optimize", 1.2),
)


def sharder(tree: Path, output: Path, check: bool) -> None:
    from data_prep.sources import ImageFolder
    from data_prep.writer import write_shards
    from pipeline.shards.image_checks import ImageRules

    write_shards(ImageFolder(tree, "train"), output, "train", SAMPLES_PER_SHARD, WORKERS, rules=ImageRules(decode=check))


def shard_writer(tree: Path, output: Path) -> None:
    """The loop from webdataset's documentation."""
    import webdataset

    files = listed(tree)
    label_of = {name: label for label, name in enumerate(sorted({path.parent.name for path in files}))}
    with webdataset.ShardWriter(f"{output}/train-%06d.tar", maxcount=SAMPLES_PER_SHARD, verbose=0) as writer:
        for number, path in enumerate(files):
            label = label_of[path.parent.name]
            about = {"file": path.name, "wnid": path.parent.name}
            writer.write({"__key__": f"{number:09d}", "jpg": path.read_bytes(), "cls": label, "json": about})


def litdata_sample(item: tuple[str, int]) -> dict:
    path, label = item
    return {"jpg": Path(path).read_bytes(), "cls": label}


def litdata_optimize(tree: Path, output: Path) -> None:
    import litdata

    files = listed(tree)
    label_of = {name: label for label, name in enumerate(sorted({path.parent.name for path in files}))}
    inputs = [(str(path), label_of[path.parent.name]) for path in files]
    litdata.optimize(litdata_sample, inputs, str(output), chunk_bytes="64MB", num_workers=WORKERS, verbose=False)


_parts: list[list[bytes]] = []  # of the decoding processes, which are forked: nothing is sent to them


def decode_only(tree: Path, output: Path) -> None:
    """libjpeg-turbo on two cores: the least that a check by decoding can cost. simplejpeg adds nothing to it but a call.

    Processes, because threads of one interpreter take up to a tenth longer.
    """
    files = listed(tree)
    data = {path: path.read_bytes() for path in {path.resolve() for path in files}}
    _parts[:] = [[data[path.resolve()] for path in files[i::WORKERS]] for i in range(WORKERS)]
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        pool.map(decode_share, [-1] * WORKERS, chunksize=1)  # both are up
        started = time.perf_counter()
        pool.map(decode_share, range(WORKERS), chunksize=1)
        print("seconds", time.perf_counter() - started)  # without the reading


def decode_share(number: int) -> None:
    import simplejpeg

    for jpeg in _parts[number] if number >= 0 else _parts[0][:4]:
        simplejpeg.decode_jpeg(jpeg)


def copy(tree: Path, output: Path) -> None:
    subprocess.run(["cp", "-rL", tree, output], check=True)


CONTESTANTS: dict[str, tuple[Callable[[Path, Path], None], str | None]] = {  # with the package that it needs
    "libjpeg-turbo decodes, writes nothing": (decode_only, "simplejpeg"),
    "sharder, images checked": (lambda tree, output: sharder(tree, output, check=True), None),
    "sharder, --no-check": (lambda tree, output: sharder(tree, output, check=False), None),
    "webdataset.ShardWriter": (shard_writer, "webdataset"),
    "LitData optimize": (litdata_optimize, "litdata"),
    "cp -r": (copy, None),
}


def listed(tree: Path) -> list[Path]:
    return sorted(tree.glob("*/*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder <class>/*.JPEG")
    parser.add_argument(
        "--output", type=Path, default=Path(tempfile.gettempdir()), help="where to write (default: %(default)s)"
    )
    parser.add_argument("--copies", type=int, default=20, help="how often the images are repeated (default: 20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)  # this process is one
    args = parser.parse_args()
    if args.contestant:
        return run_contestant(args.contestant, args.images, args.output)
    with tempfile.TemporaryDirectory(dir=args.output, prefix="sharding-") as folder:
        measure(args.images.resolve(), Path(folder), args.copies, args.rounds)


def measure(images: Path, folder: Path, copies: int, rounds: int) -> None:
    """Run all contestants and print the table."""
    files = listed(images)
    small, full = (link_tree(files, folder / name, times) for name, times in (("small", SMALL_COPIES), ("full", copies)))
    count = len(files) * (copies - SMALL_COPIES)
    size = sum(path.stat().st_size for path in files) * (copies - SMALL_COPIES)
    print(f"{count} images, {size / 1e6:.0f} MB, {rounds} rounds, output in {folder.parent}")
    names = [name for name, (_, package) in CONTESTANTS.items() if package is None or find_spec(package)]
    for missing in CONTESTANTS.keys() - set(names):
        print(f"{missing} is skipped: {CONTESTANTS[missing][1]} is not installed")
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names:
            seconds, cpu_seconds = (b - a for a, b in zip(*(timed(name, tree, folder / "output") for tree in (small, full))))
            if round_ > 0:  # the first fills the page cache
                wall[name].append(count / seconds)
                cpu[name].append(cpu_seconds / count * 1e3)
    rate = {name: statistics.median(values) for name, values in wall.items()}
    print(
        "\n| contestant | images/s | spread | CPU ms per image | share of cp | share of the decoder's limit |\n|---|---|---|---|---|---|"
    )
    limit = rate.get("libjpeg-turbo decodes, writes nothing", float("nan"))
    for name in names:
        spread = f"{min(wall[name]):.0f}-{max(wall[name]):.0f}"
        shares = f"{rate[name] / rate['cp -r']:.2f} | {rate[name] / limit:.2f}"
        print(f"| {name} | {rate[name]:.0f} | {spread} | {statistics.median(cpu[name]):.2f} | {shares} |")
    print()
    for name, other, least in GOALS:
        if other in rate:  # of one round and its neighbour: what disturbs the machine disturbs both
            ratio = statistics.median(ours / theirs for ours, theirs in zip(wall[name], wall[other]))
            print(f"{'PASS' if ratio >= least else 'no pass'}: {name} is {ratio:.2f} x {other}, goal {least}")


def timed(name: str, tree: Path, output: Path) -> tuple[float, float]:
    """(wall, CPU) seconds of one contestant on one tree, until its files are on the disk."""
    output.mkdir()
    command = [sys.executable, __file__, "--contestant", name, "--images", str(tree), "--output", str(output)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode != 0:
        sys.exit(f"{name} failed:\n{result.stderr[-3000:]}")
    seconds = float([line for line in result.stdout.splitlines() if line.startswith("seconds ")][0].split()[1])
    shutil.rmtree(output)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_contestant(name: str, tree: Path, output: Path) -> None:
    started = time.perf_counter()
    CONTESTANTS[name][0](tree, output)
    for path in output.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    print("seconds", time.perf_counter() - started)


def link_tree(files: list[Path], folder: Path, copies: int) -> Path:
    """A tree <class>/*.JPEG of links to the files, each several times."""
    for path in files:
        (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
        for number in range(copies):
            (folder / path.parent.name / f"{path.stem}_{number}.JPEG").symlink_to(path)
    return folder


if __name__ == "__main__":
    main()
