"""Stages ``step``, ``variant`` and ``authors``: steps of the real training loop, one setting in each process.

It starts a run and takes ``training_step`` after ``training_step``, as ``pipeline.train`` does; images/s, MFU and the wait for data are
those of the run's own log.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from benchmarks.gpu.cases import AUTO
from benchmarks.gpu.common import PROFILED, Context, PeakMemory, Rows, Values, has_module, synchronize

if TYPE_CHECKING:
    from pipeline.cluster.world import World
    from pipeline.config import Config


def measure(context: Context) -> Rows:
    for needed in ("deepspeed", "fvcore"):
        if not has_module(needed):
            yield {"failed": f"{needed} is not there"}
            return
    from benchmarks.gpu.in_memory import pretend_dali
    from pipeline.cluster.rendezvous import disconnect, init_world

    in_memory = context.options["source"] == "memory"
    if in_memory:
        pretend_dali()  # whatever it does on this machine, these steps do not need it
    elif not has_module("nvidia.dali"):
        yield {"skipped": "DALI is not there"}
        return
    if "train.deterministic=true" in context.options.get("changed", ""):
        from pipeline.step.precision import make_deterministic

        make_deterministic()  # before CUDA starts
    world = init_world()
    config, told = case_config(context, world.size), context.options
    if context.stage == "authors":
        from benchmarks.gpu.authors import measure_authors

        yield measure_authors(context, config)
        return
    values = measure_case(context, config, world, in_memory)
    kernels = values.pop("kernels", [])
    if values["compile"] != config.train.compile:
        values["failed"] = f"train.compile={config.train.compile} failed, so this is without"
    yield values
    if context.stage == "step" and (told["compile"], context.batch, world.size, in_memory) == (AUTO, 128, 1, True):
        for number, kernel in enumerate(kernels, 1):
            yield {"stage": "kernel", "case": f"{told['model']} {number}", **kernel}
    disconnect()


def case_config(context: Context, world_size: int = 1) -> Config:
    """The model's recipe on the generated shards, without what other cases turn on."""
    from pipeline.config import load_config

    told = context.options
    on_gpu = told["source"] == "loader" and context.gpus and context.decode in ("regions", "whole")
    name = "-".join(str(value).replace("=", "-") for value in told.values())
    words = [
        f"data.path={context.shards}",
        f"data.decode={'gpu' if on_gpu else 'cpu'}",
        f"output_dir={context.work / 'runs' / f'{name}-{world_size}'}",
        f"model.num_classes={context.classes}",
        f"model.image_size={context.image_size}",
        f"train.global_batch_size={context.batch * world_size}",
        f"train.micro_batch_size={context.batch}",
        f"train.zero_stage={told.get('zero_stage', 0)}",
        f"train.compile={told.get('compile', 'off')}",
        "train.activation_checkpointing=false",
        "train.max_skipped_steps=1000000",
        "train.epochs=100000",  # no end within the measurement
        "optim.warmup_epochs=1000",
        f"log.every_steps={_counts(context)[2]}",
    ]
    return load_config(f"configs/{told['model']}.yaml", words + told.get("changed", "").split())


def measure_case(context: Context, config: Config, world: World, in_memory: bool) -> Values:
    """Start a run and take steps."""
    from benchmarks.gpu.in_memory import batches_in_memory
    from benchmarks.gpu.trace import profiled
    from pipeline.cluster.environment import StopSignal
    from pipeline.cluster.heartbeat import Heartbeat
    from pipeline.training.loop import training_step
    from pipeline.training.start import Start

    warm, timed, window = _counts(context)
    memory = PeakMemory(world.device)
    with batches_in_memory() if in_memory else nullcontext(), Heartbeat(world, config.distributed) as heartbeat:
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
            peak, compiled = memory.gib(), run.compilation.kind
            traced = profiled(step, world.device, 1 if context.miniature else PROFILED)
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    windows = [row for row in rows if warm < row["step"] <= warm + timed and row["step"] % window == 0]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in windows)

    rate = median("images_per_second")
    return {
        "ms": 1e3 * config.train.global_batch_size / rate,
        "images_per_second": rate,
        "mfu": median("mfu") if world.device.type == "cuda" else None,  # a CPU has no peak to compare with
        **traced,
        "data_wait": median("data_wait"),
        "peak_gib": peak,
        "first_step_s": first,
        "zero_stage": stage,
        "compile": compiled,  # off if it failed
        **({"skipped_steps": run.skipped_steps} if run.skipped_steps else {}),  # their gradient was not finite
    }


def _counts(context: Context) -> tuple[int, int, int]:
    """Steps before the measurement, measured ones, and those between two lines of the run's log."""
    return (1, 2, 1) if context.miniature else (20, 30, 10)
