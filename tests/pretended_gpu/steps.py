"""Count what training steps ask of the GPU: a program for the pretended GPU, which prints a line of JSON for each case.

    python tests/pretended_gpu/run.py -m pretended_gpu.steps --model pervit_t [--ranks 8] [--zero 0,1] [--compile off,blocks] [KEY=VALUE...]

The steps are those of the real loop, on random images in memory: what the loader copies and waits for in its own threads is not
counted. With ``--ranks 8`` this process is rank 0 of eight, whose other ranks NCCL's and gloo's stand-ins are.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from pretended_gpu.counts import counted

if TYPE_CHECKING:
    from pipeline.cluster.world import World

WARM, TIMED = 3, 4  # steps before the counted ones, which compile and allocate; counted ones
CLASSES = 10
BATCH = 128  # images of a rank, the recipes' number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pervit_t")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero", default="0", help="stages")
    parser.add_argument("--compile", default="off", help="values of train.compile")
    parser.add_argument("--names", action="store_true", help="also print how often each call was made")
    parser.add_argument("--where", action="store_true", help="also print the lines of Python that wait for the GPU in a step")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config overrides")
    args = parser.parse_args()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    with tempfile.TemporaryDirectory() as work:
        shards, world = tiny_shards(Path(work)), pretended_world(args.ranks)
        for zero, kind in product(args.zero.split(","), args.compile.split(",")):
            words = [f"data.path={shards}", f"output_dir={work}/run-{zero}-{kind}", f"train.zero_stage={zero}", *args.overrides]
            measured = measure(args.model, world, [*words, f"train.compile={kind}"], args.where)
            if not args.names:
                del measured["names"]
            print(json.dumps({"model": args.model, "ranks": args.ranks, "zero": int(zero), **measured}), flush=True)
    os._exit(0)  # NCCL's threads wait for ranks that are not there


def measure(model: str, world: World, changed: list[str], where: bool) -> dict[str, Any]:
    """Start a run and take steps; figures per step."""
    import torch

    from pipeline.cluster.environment import StopSignal
    from pipeline.cluster.heartbeat import Heartbeat
    from pipeline.config import load_config
    from pipeline.training.loop import training_step
    from pipeline.training.start import Start
    from pretended_gpu.answers import Yes

    words = [
        "data.decode=cpu",
        f"model.num_classes={CLASSES}",
        f"train.global_batch_size={BATCH * world.size}",
        f"train.micro_batch_size={BATCH}",
        "train.activation_checkpointing=false",
        "train.precision=bf16",
        "train.epochs=100000",
        "optim.warmup_epochs=1000",
        "log.every_steps=1000",  # what a line of the log fetches is not a step's
    ]
    config = load_config(f"configs/{model}.yaml", [*words, *changed])
    alone = replace(world, size=1)  # the others send no heartbeats

    def step() -> None:
        training_step(run)
        run.exchange_status()

    with ExitStack() as stack:
        stack.enter_context(patch("pipeline.logs.run_log._PACE", math.inf))  # no line of progress, which fetches the loss
        stack.enter_context(patch("pipeline.step.train_step.Answer", Yes))
        stack.enter_context(patch("torch._tensor_str._tensor_str", lambda *_: "..."))  # DeepSpeed's ZeRO 3 formats parameters
        stack.enter_context(in_memory())
        run = Start(config, world).open_run(StopSignal(), stack.enter_context(Heartbeat(alone, config.distributed)))
        assert run is not None
        stack.enter_context(run)
        gc.collect()
        torch.cuda.empty_cache()  # what messages of the start and earlier runs have left might be read as NaN
        for _ in range(WARM):
            step()
        with counted() as total:
            began = time.process_time()
            for _ in range(TIMED):
                step()
            milliseconds = 1e3 * (time.process_time() - began) / TIMED
        if where:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                step()
                torch.cuda.set_sync_debug_mode("default")
    torch.compiler.reset()
    return {
        "compile": run.compilation.kind,  # off if it failed
        "launches": total.launches / TIMED,
        "convolutions": total.named("convolution") / TIMED,  # of the launches
        "in graphs": total.in_graphs / TIMED,
        "copies": total.copies / TIMED,
        "synchronisations": total.synchronisations / TIMED,
        "collectives": total.collectives / TIMED,
        "host ms": round(milliseconds, 1),
        "names": {name: count / TIMED for name, count in total.most_common()},
    }


def pretended_world(ranks: int) -> World:
    """Connect: one process as always, or rank 0 of several."""
    from pipeline.cluster.rendezvous import init_world

    if ranks == 1:
        return init_world()
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

    import pipeline.cluster.rendezvous as rendezvous

    new_group = dist.new_group

    def without_gloo(*arguments: Any, **named: Any) -> Any:
        return new_group(*arguments, **{**named, **({"backend": "fake"} if named.get("backend") == "gloo" else {})})

    def connect(world: Any, timeout: timedelta) -> None:
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=ranks, timeout=timeout, device_id=world.device
        )

    os.environ.update(
        RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    dist.new_group = without_gloo
    with patch.object(rendezvous, "connect", connect):
        return init_world()


@contextmanager
def in_memory() -> Iterator[None]:
    """Runs that start within have one random batch in their loader's place."""
    from pipeline.step.train_step import random_batch

    def loader(shards: Any, settled: Any, world: Any, first_step: int, model: Any) -> Any:
        config = settled.config
        batch = random_batch(config.train.micro_batch, config.model, world.device)

        class InMemory:
            bad, decode, failure = SimpleNamespace(take_unreported=dict), "cpu", None

            def __next__(self) -> Any:
                return batch

            def close(self) -> None: ...

        return InMemory()

    start = "pipeline.training.start"
    with patch(f"{start}.training_loader", loader), patch(f"{start}.evaluation_loader", lambda *_: None):
        yield


def tiny_shards(work: Path) -> Path:
    """A shard set of one small image for each class."""
    from PIL import Image

    from data_prep.sources import ImageFolder
    from data_prep.writer import write_shards

    for split in ("train", "val"):
        for number in range(CLASSES):
            path = work / "images" / split / f"class{number}" / f"{number}.JPEG"
            path.parent.mkdir(parents=True)
            Image.new("RGB", (32, 32), (20 * number, 0, 0)).save(path)
        write_shards(ImageFolder(work / "images", split), work / "shards", split)
    return work / "shards"


if __name__ == "__main__":
    main()
