"""What the ranks of a large job ask of the file system to write a checkpoint and to go on from it, counted in real processes.

    python benchmarks/scale_checkpoint.py [--processes 2 16 64] [--stages 0 2] [--load-with 48]

Each size is a job of that many processes on this machine, which talk over gloo: PerViT-T of a quarter of its width takes two steps with
DeepSpeed, saves with the run's saver, and a second job of --load-with processes (default: the same number) verifies the checkpoint and
loads it. Counted are the calls that reach the metadata server of a network file system (open, stat) within the checkpoint's folder.
Processes share two cores here, so that the seconds are an upper bound. Bounded: 64 processes take about 12 GiB of memory for two minutes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")

import safetensors  # noqa: E402

from benchmarks.checkpoint import Training  # noqa: E402
from pipeline.checkpoint import loading, parts  # noqa: E402
from pipeline.cluster.rendezvous import init_world  # noqa: E402
from pipeline.config import load_config  # noqa: E402

SMALL = (
    "model.switches={widths: [16, 16, 16, 16]}", "model.image_size=32", "train.micro_batch_size=1", "augment.mixup=0",
    "augment.cutmix=0", "train.ema_decay=0.9",
)  # fmt: skip
_CONFIG = Path(__file__).parent.parent / "configs" / "pervit_t.yaml"
# For processes forked from one that has imported these; DeepSpeed imports some of them late.
_PRELOAD = ["torch", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "functorch.compile", "benchmarks.checkpoint"]
_PATIENCE = 550.0  # seconds for a job


class Calls:
    """Counts of calls for files in a checkpoint, in this process."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.stats = 0
        os.stat, self._stat = self._counting_stat, os.stat  # type: ignore[assignment]
        self._open = safetensors.safe_open
        for module in (parts, safetensors):
            module.safe_open = self._counting_open  # type: ignore[attr-defined]
        sys.addaudithook(self._audit)

    def clear(self) -> None:
        self.opened, self.stats = [], 0

    def taken(self) -> dict[str, int]:
        return {"opens": len(self.opened), "files": len(set(self.opened)), "stats": self.stats}

    def _counting_stat(self, path, *rest, **keys):  # type: ignore[no-untyped-def]
        self.stats += "checkpoints/" in str(path)
        return self._stat(path, *rest, **keys)

    def _counting_open(self, path, *rest, **keys):  # type: ignore[no-untyped-def]
        self.opened.append(Path(path).name)
        return self._open(path, *rest, **keys)

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "open" and "checkpoints/" in str(arguments[0]):
            self.opened.append(Path(str(arguments[0])).name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 16, 64])
    parser.add_argument("--stages", nargs="*", type=int, default=[0, 2], help="ZeRO stages")
    parser.add_argument("--load-with", type=int, help="processes of the job that loads")
    args = parser.parse_args()
    print("| ZeRO | processes | files | KiB, least to most | manifest, KiB | opens to write, all | stats | save, s |", end="")
    print(" load with | opens, all | opens, of a rank | different files | stats, all | load, s |\n" + "|---" * 14 + "|")
    for stage in args.stages:
        for size in args.processes:
            print(row(stage, size, args.load_with or size), flush=True)


def row(stage: int, size: int, load_with: int) -> str:
    with tempfile.TemporaryDirectory(prefix="scale-checkpoint-") as name:
        wrote = job(Path(name), stage, size, "write")
        (folder,) = Path(name).glob("checkpoints/step-*")
        sizes = [path.stat().st_size / 1024 for path in folder.iterdir() if path.suffix == ".safetensors"]
        manifest = (folder / "checkpoint.json").stat().st_size / 1024
        read = job(Path(name), stage, load_with, "load")
    cells: list[object] = [
        stage, size, len(sizes), f"{min(sizes):.0f} to {max(sizes):.0f}", f"{manifest:.1f}", sum(each["opens"] for each in wrote),
        sum(each["stats"] for each in wrote), f"{max(each['seconds'] for each in wrote):.1f}", load_with,
        sum(each["opens"] for each in read), f"{statistics.median(each['opens'] for each in read):.0f}",
        f"{statistics.median(each['files'] for each in read):.0f}", sum(each["stats"] for each in read),
        f"{max(each['seconds'] for each in read):.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def job(folder: Path, stage: int, size: int, what: str) -> list[dict[str, float]]:
    """What each rank of a job has counted."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common["PERVIT_JOB_SECRET"] = secrets.token_hex(32)
    processes = []
    for rank in range(size):
        own = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        processes.append(context.Process(target=run_rank, args=(own, folder, stage, what), daemon=True))
        processes[-1].start()
    try:
        deadline = time.monotonic() + _PATIENCE
        for rank, process in enumerate(processes):
            process.join(max(1.0, deadline - time.monotonic()))
            assert process.exitcode == 0, (
                f"rank {rank}: {process.exitcode}, {(folder / f'{what}-{rank}.err').read_text()[-1500:]}"
            )
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [json.loads((folder / f"{what}-{rank}.json").read_text()) for rank in range(size)]


def run_rank(environment: dict[str, str], folder: Path, stage: int, what: str) -> None:
    """Process: a rank of a job."""
    os.environ.update(environment)
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    os.dup2(os.open(folder / f"{what}-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    calls, world = Calls(), init_world(600)
    training = Training(
        load_config(_CONFIG, [*SMALL, f"train.zero_stage={stage}", f"train.global_batch_size={size}"]), world, folder
    )
    if what == "write":
        for _ in range(2):
            training.step()
    world.barrier()
    calls.clear()
    began = time.monotonic()
    if what == "write":
        training.save()
        training.saver.finish()
    else:
        verified = loading.newest_intact(folder, world)
        assert verified
        loading.load(training.engine, verified, training.ema, world)
    taken = {**calls.taken(), "seconds": time.monotonic() - began}
    (folder / f"{what}-{rank}.json").write_text(json.dumps(taken))
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
