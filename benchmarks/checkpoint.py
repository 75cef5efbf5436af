"""The cost of a checkpoint: how long it stalls training, and how fast it is written and read.

    python -m benchmarks.checkpoint --folder DIR [--config configs/pervit_t.yaml] [--batch 16] [--rounds 5]
    launch/local.sh 2 -- benchmarks.checkpoint --folder DIR [...]
    python -m benchmarks.checkpoint --folder DIR --bucket s3://BUCKET/PREFIX [...]

Training steps run on a fixed batch of random images; steps with and without a save in progress are interleaved. Files are
compared with DeepSpeed's own checkpoints and with a plain copy of the same bytes to the same disk, flushed, one file per rank;
files are dropped from the page cache before they are read. Figures are medians of the slowest rank. With --bucket, a second training
takes turns with the first in the same process, and its saves follow to the store: a save lasts until its manifest is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from pipeline.checkpoint import loading
from pipeline.checkpoint.bucket import RunStore
from pipeline.checkpoint.folder import FOLDER, LOCK, latest_step, step_folder
from pipeline.checkpoint.loading import newest_intact
from pipeline.checkpoint.manifest import RunState
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.command_line import run_command
from pipeline.config import Config, load_config
from pipeline.models import create_model
from pipeline.optim.averages import WeightAverage
from pipeline.optim.engine import build_engine, optimizer_step
from pipeline.stores.lock import StoreLock
from pipeline.stores.place import RemotePath

CLASSES = 1000


class Training:
    """A training run without data: engine, saver and step.

    Args:
        config: recipe and model.
        world: all ranks.
        folder: the run folder.
        bucket: URL of the run's store; empty: it has none.
    """

    def __init__(self, config: Config, world: World, folder: Path, bucket: str = "") -> None:
        self.config, self.world, self.folder, self.steps = config, world, folder, 0
        self.engine, self.agreement = build_engine(self._model(), config, world), Agreement()
        self.ema = WeightAverage(self.engine, config.train.ema_decay) if config.train.ema_decay else None
        self.mirror = _open_mirror(folder, bucket, world) if bucket else None
        self.saver = Saver(folder, world, config.checkpoint, self.agreement, mirror=self.mirror)
        size = config.model.image_size
        self.images = torch.randn(config.train.micro_batch_size, 3, size, size, device=world.device)  # (B, 3, H, W)
        self.labels = torch.randint(CLASSES, (len(self.images),), device=world.device)  # (B,)

    def step(self) -> float:
        """A training step with what the loop does for checkpoints after each.

        Returns:
            Its seconds.
        """
        began = time.perf_counter()
        self.engine.backward(F.cross_entropy(self.engine(self.images).float(), self.labels))
        optimizer_step(self.engine)
        if self.ema:
            self.ema.update()
        self.steps += 1
        sent = self.mirror.sent if self.mirror else 0
        agreed = self.agreement.exchange(save_failed=self.saver.failed, written=self.saver.written, sent=sent)
        self.saver.settle(agreed)
        if self.mirror:
            self.mirror.settle(agreed.sent)
        _synchronize(self.world)
        return time.perf_counter() - began

    def save(self) -> None:
        """Begin to save."""
        self.saver.save(self.engine, self.ema, self.state())

    def complete(self, step: int) -> bool:
        """Whether the save of a step, the last one, is complete."""
        return latest_step(self.folder) == step and not (self.mirror and self.mirror.busy)

    def finish(self) -> None:
        """Wait until it is. Collective."""
        self.saver.finish()
        if self.mirror:
            self.mirror.finish(self.agreement, lambda: False, lambda: None, None)

    def state(self) -> RunState:
        """The training state that a run would save at this point."""
        return RunState(
            step=self.steps,
            samples=self.steps * len(self.images) * self.world.size,
            skipped_steps=0,
            config=self.config.model_dump(mode="json"),
            config_hash="0" * 64,
            classes=[str(i) for i in range(CLASSES)],
            data={"samples": 1, "fingerprint": "none"},
            world_size=self.world.size,
            zero_stage=self.config.train.zero_stage,
            last_step=self.steps,
        )

    def fresh(self) -> Training:
        """Another one of the same config, into which a checkpoint can be read."""
        return Training(self.config, self.world, self.folder)

    def _model(self) -> torch.nn.Module:
        model = self.config.model
        return create_model(model.name, CLASSES, model.image_size, switches=model.switches)


def stall_table(trainings: dict[str, Training], rounds: int, steps: int) -> list[str]:
    """Rows: how long a save stalls training, and its total cost, of trainings that take turns.

    The total cost is in CPU time, which other processes on the machine do not affect: a writer thread takes cores from the
    training, not wall time from all of it.
    """
    lines = [
        "| saved to | training step | a save holds it up for | of a step | steps until it is complete | these take | CPU time of a save / of a step |",
        "|---|---|---|---|---|---|---|",
    ]
    measured: dict[str, tuple[list[float], ...]] = {name: ([], [], [], [], []) for name in trainings}
    for round_, name in ((number, name) for number in range(rounds + 1) for name in trainings):  # the first is a warm-up
        training, (plain, stalls, slower, counts, costs) = trainings[name], measured[name]
        began = time.process_time()
        without = [training.step() for _ in range(steps)]
        cpu = (time.process_time() - began) / steps
        began, saved_step = time.process_time(), training.steps
        training.save()
        during = []
        for _ in range(steps):
            complete = training.complete(saved_step)
            during.append((training.step(), complete))
        cost = time.process_time() - began - steps * cpu
        training.finish()
        if round_:
            slow = [seconds for seconds, complete in during if not complete]
            plain += without
            stalls.append(training.saver.stall_seconds)
            slower.append(statistics.median(slow) / statistics.median(without))
            counts.append(len(slow))
            costs.append(cost / cpu)
    for name, values in measured.items():
        gather = trainings[name].world.gather
        step, stall, slow, count, cost = (max(gather(statistics.median(each))) for each in values)
        lines.append(
            f"| {name} | {1e3 * step:.0f} ms | {1e3 * stall:.1f} ms | {stall / step:.1%} | {count:.0f} | x {slow:.2f} | {cost:.2f} |"
        )
    return lines


def _open_mirror(folder: Path, url: str, world: World) -> Mirror:
    lock = StoreLock(RemotePath(url), LOCK, {}, "benchmark") if world.is_main else None
    if lock:
        folder.mkdir(parents=True)
        lock.take()
    mirror = Mirror(folder, RunStore(RemotePath(url)), lock, leads=world.is_main, apart=False)
    mirror.start()
    return mirror


def throughput_table(training: Training, rounds: int) -> list[str]:
    """Rows: bytes per second to the disk and back."""
    world, folder = training.world, training.folder
    copies, peers = folder / "copy", folder / "deepspeed"
    saved, own = step_folder(folder, training.steps), f"part-{world.rank:05d}.safetensors"
    other = training.fresh()
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}

    def measure(name: str, action: Callable[[], object], files: Path) -> None:
        world.barrier()
        began = time.perf_counter()
        action()
        world.barrier()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        sizes[name] = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())

    for _ in range(rounds):
        for path in (folder / FOLDER, copies, peers):
            if world.is_main:
                shutil.rmtree(path, ignore_errors=True)
        world.barrier()
        measure("save", lambda: (training.save(), training.saver.finish()), saved.parent)
        copies.mkdir(exist_ok=True)
        measure("copy", lambda: _copy(saved / own, copies / own), copies)
        measure("deepspeed save", lambda: training.engine.save_checkpoint(str(peers), tag="t"), peers)
        measure("deepspeed flush", lambda: _flush(peers, world), peers)
        _drop(folder, world)
        measure("load", lambda: _load(other), saved)
        _drop(folder, world)
        measure("copy back", lambda: _copy(saved / own, copies / own), saved)
        _drop(folder, world)
        measure("deepspeed load", lambda: other.engine.load_checkpoint(str(peers), tag="t"), peers)
    seconds["deepspeed save"] = [sum(pair) for pair in zip(seconds["deepspeed save"], seconds.pop("deepspeed flush"))]

    def row(what: str, name: str, copy: str) -> str:
        """Speeds, and the ratio to the copy round by round."""
        mb, copied = sizes[name] / 1e6, sizes[copy] / 1e6
        ratio = statistics.median((mb / a) / (copied / b) for a, b in zip(seconds[name], seconds[copy]))
        return f"| {what} | {mb:.0f} MB | {statistics.median(seconds[name]):.2f} s | {mb / statistics.median(seconds[name]):.0f} MB/s | {ratio:.2f} |"

    return [
        "| | size | time | speed | speed / plain copy |",
        "|---|---|---|---|---|",
        row("save: copy in memory, write, checksum, flush, publish", "save", "copy"),
        row("DeepSpeed's save_checkpoint, then flushed", "deepspeed save", "copy"),
        row("plain copy, flushed", "copy", "copy"),
        row("load: every checksum, then into the engine", "load", "copy back"),
        row("DeepSpeed's load_checkpoint", "deepspeed load", "copy back"),
        row("plain copy from a cold cache, flushed", "copy back", "copy back"),
    ]


def _load(training: Training) -> None:
    verified = newest_intact(training.folder, training.world)
    loading.load(training.engine, verified, training.ema, training.world)


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reading, open(target, "wb") as writing:
        shutil.copyfileobj(reading, writing, 16 << 20)
        writing.flush()
        os.fsync(writing.fileno())


def _flush(folder: Path, world: World) -> None:
    """Flush DeepSpeed's files to the disk, as it does not: until then a power failure loses them. Divided among the ranks."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[world.rank :: world.size]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _drop(folder: Path, world: World) -> None:
    """Drop all files from the page cache, so that reading them reads the disk."""
    world.barrier()
    for path in folder.rglob("*") if world.is_main else ():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    world.barrier()


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path, help="a new folder on the disk to measure")
    parser.add_argument(
        "--bucket", default="", metavar="URL", help="an empty place in a store: also measure saves that follow there"
    )
    parser.add_argument("--config", type=Path, default=Path("configs/pervit_t.yaml"), help="recipe and model")
    parser.add_argument("--batch", type=int, default=16, help="images per process")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--file-rounds", type=int, default=9, help="rounds of writing and reading")
    parser.add_argument("--steps", type=int, default=8, help="steps per round, without and with a save each")
    parser.add_argument("--zero-stage", type=int, default=1, choices=range(4))
    parser.add_argument("--ema", action="store_true", help="with averaged weights (DeepSpeed saves none)")
    args = parser.parse_args()
    world = init_world()
    overrides = [
        f"train.global_batch_size={args.batch * world.size}",
        f"train.micro_batch_size={args.batch}",
        f"train.zero_stage={args.zero_stage}",
        f"train.ema_decay={0.9999 if args.ema else 'null'}",
        "checkpoint.keep_last=1",
        "augment.mixup=0",  # no data: mix_group need not divide the batch
        "augment.cutmix=0",
    ]
    config = load_config(args.config, overrides)
    training = Training(config, world, args.folder / "local")
    trainings = {"the folder": training}
    if args.bucket:
        trainings["the store too"] = Training(config, world, args.folder / "stored", args.bucket)
    tables = stall_table(trainings, args.rounds, args.steps)
    if args.file_rounds:
        tables += ["", *throughput_table(training, args.file_rounds)]
    if world.is_main:
        print(f"{training.config.model.name}, {world.size} processes, batch {args.batch} each, ZeRO {args.zero_stage}\n")
        print("\n".join(tables))
        shutil.rmtree(args.folder)
    disconnect()


if __name__ == "__main__":
    run_command(main)
