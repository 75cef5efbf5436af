"""A training step: ours against the authors' form of the same model and against plain PyTorch, side by side in one run.

    python -m benchmarks.step [--models pervit_t,pervit_s,pervit_m] [--precisions fp32,bf16] [--batch 16] [--rounds 7]
    python -m benchmarks.step --shards DIR        and how long a step waits for its images

Ours goes through DeepSpeed's engine as ``pipeline.train`` does. On a CPU the authors' form has a process of its own, with glibc's
own settings: those that ours makes for memory would serve both. Steps of all forms and a matrix product take turns; figures are
medians. On a machine that others use too, compare CPU times, with ``--threads 1``: threads that wait for each other count as busy.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from benchmarks.step_apart import Apart
from benchmarks.step_data import data_report
from benchmarks.step_forms import AUTHORS, OURS, PLAIN, Setting, can_compile, forms, ours, plain
from benchmarks.step_timing import Step, Taken, peak_bytes, timed
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.command_line import run_command
from pipeline.config import load_config
from pipeline.errors import UserError
from pipeline.hardware import native_bf16
from pipeline.models import flops

PRODUCT = "matrix product"
_PRODUCT_SIDE = {"cpu": 2048, "cuda": 8192}  # large enough to reach the peak
_CLASSES = 1000
_SMALL_BATCH, _SMALL_SIZE = 8, 32  # images so few and small that what the engine does for each parameter shows
_HEAD = (
    "| model | precision | form | step, ms | CPU, ms | to ours (wall) | to ours (CPU) | of the product (wall) | (CPU) | peak, MiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
_ENGINE_HEAD = "| model | precision | ours, CPU ms | plain PyTorch, CPU ms | the engine, CPU ms |\n|---|---|---|---|---|"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/pervit_t.yaml"), help="the recipe of all models")
    parser.add_argument("--models", default="pervit_t,pervit_s,pervit_m")
    parser.add_argument("--precisions", help="fp32,bf16; default: those that the device has instructions for")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="default: this process's share of the cores")
    parser.add_argument("--compile", default="blocks", help="also with train.compile=...; off: without")
    parser.add_argument("--shards", help="a shard set: measure the wait for data too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides")
    args = parser.parse_args()
    if args.rounds < 1 or args.batch < 1:
        raise UserError(f"--rounds and --batch must be at least 1, got {args.rounds} and {args.batch}", "pass another number")
    world = init_world()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    available = ["fp32", "bf16"] if native_bf16(world.device)[0] else ["fp32"]
    precisions = args.precisions.split(",") if args.precisions else available
    compile_as = args.compile if can_compile() and args.compile != "off" else None
    settings = []
    for name in args.models.split(","):
        for precision in precisions:
            overrides = [
                f"model.name={name}",
                f"train.precision={precision}",
                f"train.global_batch_size={args.batch}",
                f"train.micro_batch_size={args.batch}",
                *([f"train.compile={compile_as}"] if compile_as else []),
                *args.overrides,
            ]
            settings.append(Setting(load_config(args.config, overrides), _CLASSES, world))
    threads = f"{torch.get_num_threads()} threads"
    print(f"batch {args.batch}, {world.device.type}, {threads}, {args.rounds} rounds; PyTorch {torch.__version__}\n\n{_HEAD}")
    for setting in settings:
        for row in comparison(setting, args.rounds, compile_as is not None):
            print(row, flush=True)
    print(
        f"\nThe engine's own time, of a step on {_SMALL_BATCH} images of {_SMALL_SIZE} pixels, where little else is left:\n\n{_ENGINE_HEAD}"
    )
    for setting in settings:
        print(engine_row(setting, args.rounds), flush=True)
    if args.shards:
        print("\n" + data_report(settings[0].config, args.shards, world.device, args.rounds))
    disconnect()


def comparison(setting: Setting, rounds: int, compiled: bool) -> list[str]:
    """Rows of the table: the forms of one model, and the share of the peak that each reaches."""
    config, device = setting.config, setting.world.device
    steps = forms(setting, compiled)
    if AUTHORS in steps and device.type == "cpu":
        steps[AUTHORS] = Apart(setting)
    peaks = {name: peak_bytes(step, device) for name, step in steps.items()}  # warms up too
    product, product_flop = matrix_product(config.train.precision, device)
    taken = interleaved({**steps, PRODUCT: product}, rounds, device)
    if isinstance(authors := steps.get(AUTHORS), Apart):
        authors.close()
    cost = flops.count(config.model.name, config.model.image_size, setting.classes, config.model.switches)
    batch = config.train.micro_batch_size
    flop = batch * cost.training_flops_per_image(batch)
    rows = []
    for name in steps:
        ratios, shares = [], []
        for clock in ("wall", "cpu"):
            own, of_ours, of_product = ([getattr(each, clock) for each in taken[form]] for form in (name, OURS, PRODUCT))
            ratios.append(statistics.median(a / b for a, b in zip(own, of_ours)))
            shares.append(statistics.median(flop / a / (product_flop / b) for a, b in zip(own, of_product)))
        wall, cpu = (statistics.median(getattr(each, clock) for each in taken[name]) for clock in ("wall", "cpu"))
        rows.append(
            f"| {config.model.name} | {config.train.precision} | {name} | {1e3 * wall:.0f} | {1e3 * cpu:.0f} | {ratios[0]:.2f} | "
            f"{ratios[1]:.2f} | {shares[0]:.0%} | {shares[1]:.0%} | {peaks[name] / 2**20:.0f} |"
        )
    return rows


def engine_row(setting: Setting, rounds: int) -> str:
    """What DeepSpeed's engine adds to a step, in CPU time: it depends on the parameters, not on the images."""
    config = setting.config
    small = {
        "model": config.model.model_copy(update={"image_size": _SMALL_SIZE}),
        "train": config.train.model_copy(update={"global_batch_size": _SMALL_BATCH, "micro_batch_size": _SMALL_BATCH}),
    }
    setting = Setting(config.model_copy(update=small), 10, setting.world)
    steps = {OURS: ours(setting), PLAIN: plain(setting)}
    for step in steps.values():
        step()
    taken = interleaved(steps, 3 * rounds, setting.world.device)
    own, without = (1e3 * statistics.median(each.cpu for each in taken[name]) for name in (OURS, PLAIN))
    added = 1e3 * statistics.median(a.cpu - b.cpu for a, b in zip(taken[OURS], taken[PLAIN]))
    return f"| {config.model.name} | {config.train.precision} | {own:.1f} | {without:.1f} | {added:.1f} |"


def interleaved(calls: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[Taken]]:
    """Call them in turn, ``rounds`` times after one round that does not count."""
    taken: dict[str, list[Taken]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            took = timed(call, device)
            if round_:
                taken[name].append(took)
    return taken


def matrix_product(precision: str, device: torch.device) -> tuple[Step, float]:
    """A product of two square matrices, which reaches the device's peak, and its floating-point operations."""
    side, repetitions = _PRODUCT_SIDE[device.type], 4
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    out = torch.empty_like(a)

    def product() -> None:
        for _ in range(repetitions):
            torch.mm(a, b, out=out)

    return product, repetitions * 2 * side**3


if __name__ == "__main__":
    run_command(main)
