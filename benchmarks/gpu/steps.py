"""Stages ``steps_t``, ``steps_s``, ``steps_m``, ``deterministic``: steps of the real training loop, one setting changed at a time.

One process on one GPU starts a run for each setting and takes ``training_step`` after ``training_step``, as ``pipeline.train``
does; images/s, MFU and the wait for data are those of the run's own log. Beside them, the authors' form of the step.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.gpu.common import Context, PeakMemory, Rows, Values, has_key, has_module, reason, synchronize

if TYPE_CHECKING:
    from pipeline.cluster.world import World
    from pipeline.config import Config

BASE, IN_MEMORY, PLAIN = "ZeRO 0", "batches in memory", "attention without its kernels"
# name -> the keys that differ from BASE, in the order of their worth should the stage be cut
CASES: dict[str, list[str]] = {
    BASE: [],
    "compile blocks": ["train.compile=blocks"],
    "ZeRO 1": ["train.zero_stage=1"],
    "checkpointing": ["train.activation_checkpointing=true"],
    IN_MEMORY: [],
    PLAIN: [],
    "compile model": ["train.compile=model"],
    "compile graphs": ["train.compile=graphs"],
}
DETERMINISTIC = {"deterministic": ["train.deterministic=true"]}  # in a process of its own: it must be set before CUDA starts
_BRIEF = (BASE, IN_MEMORY)  # in miniature


def measure(context: Context) -> Rows:
    deterministic = context.stage == "deterministic"
    model = "pervit_t" if deterministic else f"pervit_{context.stage.removeprefix('steps_')}"
    cases = DETERMINISTIC if deterministic else CASES
    if context.miniature and model != "pervit_t":
        yield model, {"skipped": "in miniature the path is that of steps_t"}
        return
    for needed in ("deepspeed", "fvcore"):
        if not has_module(needed):
            yield model, {"failed": f"{needed} is not there"}
            return
    from benchmarks.gpu.in_memory import dali_is_there

    with_loader = dali_is_there()
    from pipeline.cluster.rendezvous import disconnect, init_world

    if deterministic and has_key("train.deterministic"):
        from pipeline.step.precision import make_deterministic

        make_deterministic()
    world = init_world()
    authors: Values = {}
    if not deterministic:
        try:
            authors = measure_authors(context, model, world)
            yield "the authors' form", authors
        except Exception as error:
            yield "the authors' form", {"failed": reason(error)}
    for name, overrides in cases.items():
        if context.miniature and not deterministic and name not in _BRIEF:
            continue
        if name == PLAIN and not has_module("pipeline.kernels"):
            yield name, {"skipped": "pipeline.kernels is not there"}
            continue
        missing = [key for key in (word.partition("=")[0] for word in overrides) if not has_key(key)]
        if missing:
            yield name, {"skipped": f"{missing[0]} is not there"}
            continue
        if name == IN_MEMORY and not with_loader:
            continue  # as all the others are
        in_memory = name == IN_MEMORY or not with_loader
        label = name if with_loader else f"{name}, {IN_MEMORY} (no DALI)"
        # The switch of pipeline.kernels is read once per process.
        attention = patch("pipeline.kernels.peripheral._ASKED", "plain") if name == PLAIN else nullcontext()
        try:
            with attention:
                values = measure_case(context, case_config(context, model, name, overrides), world, in_memory, with_loader)
            yield label, {**values, **compared(values, authors)}
        except Exception as error:
            yield label, {"failed": reason(error)}
    disconnect()


def measure_authors(context: Context, model: str, world: World) -> Values:
    """The authors' step, whose utilization is counted as ours is."""
    from benchmarks.gpu.authors import measure_authors as figures
    from pipeline.hardware import native_bf16, peak_flops
    from pipeline.models import flops

    config = case_config(context, model, "authors", [])
    cost = flops.count(model, config.model.image_size, config.model.num_classes, config.model.switches)
    peak, _ = peak_flops(world.device, "bf16" if native_bf16(world.device)[0] else "fp32")
    return figures(context, config, cost.training_flops_per_image(config.train.micro_batch_size), peak)


def case_config(context: Context, model: str, name: str, overrides: list[str]) -> Config:
    """The model's recipe on the generated shards, one process, without what other cases turn on."""
    from pipeline.config import load_config

    words = [
        f"data.path={context.shards}",
        f"output_dir={context.work / model / name.replace(' ', '_')}",
        f"model.num_classes={context.classes}",
        f"model.image_size={context.image_size}",
        f"train.global_batch_size={context.batch}",
        f"train.micro_batch_size={context.batch}",
        "train.zero_stage=0",
        "train.activation_checkpointing=false",
        "train.epochs=100000",  # no end within the measurement
        "optim.warmup_epochs=1000",
        f"log.every_steps={_counts(context)[2]}",
    ]
    words += ["train.compile=off"] * has_key("train.compile")
    return load_config(f"configs/{model}.yaml", [*words, *overrides])


def measure_case(context: Context, config: Config, world: World, in_memory: bool, with_loader: bool) -> Values:
    """Start a run and take steps."""
    import torch

    from benchmarks.gpu.in_memory import batches_in_memory
    from benchmarks.gpu.trace import idle, profiled
    from pipeline.cluster.environment import StopSignal
    from pipeline.cluster.heartbeat import Heartbeat
    from pipeline.training.loop import training_step
    from pipeline.training.start import Start

    warm, timed, window = _counts(context)
    memory = PeakMemory(world.device)
    place = batches_in_memory(also_for_evaluation=not with_loader) if in_memory else nullcontext()
    with place, Heartbeat(world, config.distributed) as heartbeat:
        run = Start(config, world).open_run(StopSignal(), heartbeat)
        assert run is not None
        stage = run.train_state.engine.zero_optimization_stage()  # one process may run another than it was asked for

        def step() -> None:
            training_step(run)
            run.exchange_status()

        with run:
            began = time.perf_counter()
            step()
            synchronize(world.device)
            first = time.perf_counter() - began
            for _ in range(warm + timed - 1):
                step()
            peak = memory.gib()
            traced = profiled(step, world.device, 1 if context.miniature else 3)
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    windows = [row for row in rows if warm < row["step"] <= warm + timed and row["step"] % window == 0]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in windows)

    mfu = f"{median('mfu'):.1%}" if world.device.type == "cuda" else None  # a CPU has no peak to compare with

    rate = median("images_per_second")
    torch._dynamo.reset()  # the next case compiles its own
    ms = 1e3 * config.train.global_batch_size / rate
    return {
        "images/s": rate,
        "ms/step": ms,
        "MFU": mfu,
        "peak GiB": peak,
        "data wait": f"{median('data_wait'):.1%}",
        **traced,
        **idle({**traced, "ms/step": ms}),
        "first step, s": first,
        "ZeRO": stage,
    }


def compared(values: Values, authors: Values) -> Values:
    """Speed and memory as ratios to the authors' form."""
    if not authors:
        return {}
    ratios: dict[str, Any] = {"speed / authors'": values["images/s"] / authors["images/s"]}
    if authors["peak GiB"]:
        ratios["memory / authors'"] = values["peak GiB"] / authors["peak GiB"]
    return ratios


def _counts(context: Context) -> tuple[int, int, int]:
    """Steps before the measurement, measured ones, and those between two lines of the run's log."""
    return (1, 2, 1) if context.miniature else (20, 30, 10)
