"""The directions of PerViT's tables on CIFAR-10, as far as two cores and an evening show them: small models, a fixed budget.

    python -m benchmarks.claims --source cifar10.zip --folder runs/claims [--epochs 3] [--seeds 2] [--jobs 2]

Every variant trains from scratch with every seed on the images' own 32 pixels in patches of 4 x 4, so on 8 x 8 tokens, for the same
number of steps; runs on a tenth of the images see each of them ten times as often. The command may be stopped and started again:
shards that are there are kept, a run goes on where it was, a finished one is not repeated. The table shows means over the seeds, the
spread between them, and whether a difference of the paper has the paper's sign here and is larger than the spread.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from pipeline.command_line import run_command
from pipeline.errors import PREEMPTED, UserError

WIDTHS = (32, 48, 56, 72)  # a quarter of PerViT-T's; all else, depth and heads too, is as in configs/pervit_t.yaml
WIDTHS_WITHOUT_STEM = (44, 64, 76, 100)  # of equal cost, as in Table 1: 0.054 GMACs per image, as with the stem
IMAGE_SIZE, STEM_STRIDES, BATCH = 32, (1, 2, 1, 2), 64
_running: set[subprocess.Popen] = set()
TENTH = 0.1


@dataclass(frozen=True)
class Variant:
    """One row: a model and a part of the images."""

    title: str
    switches: tuple[str, ...] = ()  # what differs from PerViT, as ``NAME=VALUE`` of model.switches
    part: float = 1.0  # of the training images
    widths: tuple[int, ...] = WIDTHS


@dataclass(frozen=True)
class Claim:
    """``better`` is above ``worse`` in the paper's table, by ``points`` of top-1 on ImageNet."""

    table: str
    better: str
    worse: str
    points: float


VARIANTS = {
    "pervit": Variant("PerViT"),
    "no_phi_p": Variant("without Φp", ("phi_p=false",)),
    "no_stem": Variant("without the convolutional stem, wider", ("conv_stem=false",), widths=WIDTHS_WITHOUT_STEM),
    "no_cpe": Variant("without CPE", ("cpe=false",)),
    "init_conv": Variant("Φp starts as a convolution in every layer", ("phi_p_init=conv",)),
    "init_random": Variant("Φp starts at random", ("phi_p_init=random",)),
    "pervit_tenth": Variant("PerViT, a tenth of the images", part=TENTH),
    "no_phi_p_tenth": Variant("without Φp, a tenth of the images", ("phi_p=false",), TENTH),
}
CLAIMS = (
    Claim("Table 1 a, b", "pervit", "no_phi_p", 78.8 - 77.3),
    Claim("Table 1 a, d", "pervit", "no_stem", 78.8 - 77.8),
    Claim("Table 1 a, e", "pervit", "no_cpe", 78.8 - 78.1),
    Claim("Table 5", "pervit", "init_conv", 78.8 - 78.6),
    Claim("Table 5", "pervit", "init_random", 78.8 - 78.5),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="CIFAR-10: a zip or a folder of images, or cifar-10-python.tar.gz")
    parser.add_argument("--folder", type=Path, required=True, help="for shards and runs; kept")
    parser.add_argument("--epochs", type=float, default=3, help="of all images, for every run (default: 3)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each variant (default: 2)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on its share of the cores (default: 2)")
    parser.add_argument(
        "--only", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT", help=", ".join(VARIANTS)
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config, for all runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(PREEMPTED))  # by way of the exceptions, so that the runs are told
    if args.seeds < 1 or args.epochs <= 0:
        raise UserError(f"--seeds and --epochs must be above 0, got {args.seeds} and {args.epochs:g}", "pass another number")
    parts = sorted({VARIANTS[name].part for name in args.only}, reverse=True)
    shards = {part: make_shards(args.source, args.folder, part) for part in parts}
    results = train_all(args.only, args.seeds, args.jobs, args.folder, shards, args.epochs, args.set)
    print(table(results))


def train_all(
    names: list[str], seeds: int, jobs: int, folder: Path, shards: dict[float, Path], epochs: float, more: list[str]
) -> dict[str, list[float]]:
    """Top-1 of every variant, one number per seed; ``jobs`` runs at a time share out the cores."""
    cores = sorted(os.sched_getaffinity(0))
    jobs = max(1, min(jobs, len(cores)))
    shares: Queue[list[int]] = Queue()
    for job in range(jobs):
        shares.put(cores[job::jobs])

    def train_one(name: str, seed: int) -> float:
        share = shares.get()
        try:
            result = train(VARIANTS[name], folder / f"{name}_{seed}", shards[VARIANTS[name].part], seed, epochs, share, more)
        finally:
            shares.put(share)
        print(f"{VARIANTS[name].title}, seed {seed}: {result['top1']:.2f} % top-1", file=sys.stderr, flush=True)
        return result["top1"]

    top1: dict[str, list[float]] = {name: [] for name in names}
    with ThreadPoolExecutor(jobs) as pool:
        begun = [(name, pool.submit(train_one, name, seed)) for seed in range(seeds) for name in names]  # one seed first
        try:
            for name, run in begun:
                top1[name].append(run.result())
        except BaseException:
            for process in list(_running):
                process.terminate()  # each saves a checkpoint
            pool.shutdown(cancel_futures=True)
            raise
    return top1


def make_shards(source: str, folder: Path, part: float) -> Path:
    """The shards of a part of the training images, and all validation images; made once."""
    shards = folder / f"shards_{part:g}"
    if not shards.exists():  # the command shows them when they are complete
        subset = [] if part == 1 else ["--subset", f"{part:g}"]
        run(["-m", "data_prep.shard_imagenet", "--source", source, "--output", str(shards), *subset])
    return shards


def train(variant: Variant, folder: Path, shards: Path, seed: int, epochs: float, cores: list[int], more: list[str]) -> dict:
    """The evaluation at the end of a run on these cores, which is begun, continued, or finished already; ``more``: overrides."""
    result = last_evaluation(folder)
    if result is not None:
        return result
    switches = [f"model.switches.{each}" for each in variant.switches]
    overrides = [
        f"data.path={shards}",
        f"output_dir={folder}",
        f"seed={seed}",
        f"model.image_size={IMAGE_SIZE}",
        f"model.switches.stem_strides={list(STEM_STRIDES)}",
        f"model.switches.widths={list(variant.widths)}",
        *switches,
        f"train.epochs={epochs / variant.part:g}",
        f"train.global_batch_size={BATCH}",
        f"train.micro_batch_size={BATCH}",
        f"optim.warmup_epochs={0.1 * epochs / variant.part:g}",
        "eval.every_epochs=null",
        "checkpoint.keep_last=1",
        *more,
    ]
    run(["-m", "pipeline.train", "--config", "configs/cifar10.yaml", *overrides], cores)
    result = last_evaluation(folder)
    if result is None:
        raise UserError(
            f"{folder}/metrics.jsonl must have an evaluation of the last step, got none", "remove the folder and try again"
        )
    return result


def last_evaluation(folder: Path) -> dict | None:
    """The evaluation after the last step of a run that is complete."""
    log = folder / "metrics.jsonl"
    if not log.exists():
        return None
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return rows[-1] if rows and "top1" in rows[-1] else None


def run(arguments: list[str], cores: list[int] | None = None) -> None:
    """A command of ours; what it prints goes to stderr."""
    with subprocess.Popen([sys.executable, *arguments], stdout=sys.stderr) as process:
        _running.add(process)
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)  # before it counts them
        code = process.wait()
        _running.discard(process)
    if code == PREEMPTED:
        raise UserError("a run was stopped before its end and has saved a checkpoint", "run the same command, which continues")
    if code != 0:
        raise UserError(
            f"`python {' '.join(arguments)}` ended with exit code {code}", "see what it printed, then repeat the command"
        )


def table(top1: dict[str, list[float]]) -> str:
    """Markdown: a row per variant, then a row per claim of which both variants were trained."""
    lines = ["| | top-1, mean | of the runs |", "|---|---|---|"]
    for name, values in top1.items():
        each = ", ".join(f"{value:.2f}" for value in values)
        lines.append(f"| {VARIANTS[name].title} | {statistics.mean(values):.2f} | {each} |")
    lines += ["", "| claim | paper, ImageNet | here | spread | direction |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        if claim.better in top1 and claim.worse in top1:
            better, worse = top1[claim.better], top1[claim.worse]
            lines.append(
                f"| {claim.table}: {VARIANTS[claim.better].title} above {VARIANTS[claim.worse].title.replace('Φp starts', 'Φp that starts')} "
                f"| +{claim.points:.1f} | {statistics.mean(better) - statistics.mean(worse):+.2f} | {spread(better, worse):.2f} "
                f"| {verdict(better, worse)} |"
            )
    if {"pervit", "no_phi_p", "pervit_tenth", "no_phi_p_tenth"} <= top1.keys():
        on_all, on_tenth = (
            statistics.mean(top1[f"pervit{suffix}"]) - statistics.mean(top1[f"no_phi_p{suffix}"]) for suffix in ("", "_tenth")
        )
        lines += ["", f"Φp gains {on_all:+.2f} points on all images and {on_tenth:+.2f} on a tenth of them."]
    return "\n".join(lines)


def spread(*groups: list[float]) -> float:
    """The largest difference between two seeds of one variant; 0 with one seed."""
    return max(max(values) - min(values) for values in groups)


def verdict(better: list[float], worse: list[float]) -> str:
    """What a few runs allow to say."""
    difference = statistics.mean(better) - statistics.mean(worse)
    if min(len(better), len(worse)) < 2:
        return "one seed: nothing can be said"
    if abs(difference) <= spread(better, worse):
        return "does not show: within the spread"
    return "as in the paper" if difference > 0 else "the other way"


if __name__ == "__main__":
    run_command(main)
