"""Examine a rank's node with the parts that a run uses: versions, memory, data, cache, decoder, links to other nodes."""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from pipeline.checkpoint.bucket import RunStore
from pipeline.cluster.environment import node_name
from pipeline.cluster.host import cuda_of_driver, memory
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.errors import first_line
from pipeline.hardware import GIB
from pipeline.loader.probe import DRIVER, decoding_verdict
from pipeline.logs.run_files import code_version
from pipeline.shards.mixed_set import open_training_set
from pipeline.stores.place import Place, RemotePath, parse_place
from pipeline.stream.samples import DamagedSample

clock: Callable[[], float] = time.time  # seconds since 1970
_IMAGES, _BATCH = 1024, 64  # of the training set, evenly spread over it, that every node reads; in a batch
_CHUNK, _CHUNKS = 8 << 20, 4  # bytes that are written to the cache, read back, and how often
_SMALL, _LARGE = 1 << 20, 1 << 24  # bytes of a message: the second if the first takes less than ``_QUICK`` seconds
_QUICK = 0.05
_TRIES = 5  # to read another node's clock


def limited(what: str, seconds: float, device: torch.device, action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Run an action in a thread: its result, None where there is none within ``seconds``, and a sentence about what is wrong."""
    found: dict[str, Any] = {}

    def work() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            found["result"] = action()
        except Exception as error:
            found["fault"] = f"{what}: {first_line(error)}"

    thread = threading.Thread(target=work, name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if "result" in found:
        return found["result"], []
    return None, [found.get("fault", f"{what}: no answer within {seconds:.0f} s")]


def examine_rank(config: Config, world: World, reads: bool, seconds: float) -> dict[str, Any]:
    """Find what this rank can say of its node, as plain data. ``reads``: also try data, cache and decoder, which take at most
    ``seconds`` together."""
    on_gpu = world.device.type == "cuda"
    code = code_version(config)
    versions = {**code["packages"], "Python": code["python"], "the commit": str(code["git_commit"])}
    if DRIVER.exists():
        versions |= {"driver": DRIVER.read_text().split("\n")[0], "CUDA of the driver": str(cuda_of_driver())}
    if on_gpu:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": nccl, "GPU": torch.cuda.get_device_name(world.device)}
    report: dict[str, Any] = {
        "versions": versions,
        "device": str(world.device),
        "CPUs": len(os.sched_getaffinity(0)),
        "memory": memory()[1] / GIB,
        "shm": psutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else 0.0,
        "faults": [],
    }
    if on_gpu:
        report["gpu_memory"] = torch.cuda.mem_get_info(world.device)[0] / GIB
    if reads:
        run = parse_place(config.output_dir)
        tried: dict[str, Callable[[], Any]] = {"data": lambda: read_data(config, world, seconds / 6)}
        tried["output_dir"] = lambda: write_and_read(
            run if isinstance(run, RemotePath) else next(filter(Path.is_dir, (run, *run.parents)))
        )
        if cache := config.data.cache:
            tried["cache"] = lambda: write_and_read(Path(cache))
        deadline = time.monotonic() + seconds
        for left, (what, action) in zip(range(len(tried), 0, -1), tried.items()):
            report[what], faults = limited(what, (deadline - time.monotonic()) / left, world.device, action)
            report["faults"] += faults
        if on_gpu and config.data.decode != "cpu":  # the first time on a node takes long, and a run may do without

            def decodes() -> str:
                return decoding_verdict(open_training_set(config.data.path, {}), world.device).form

            report["decodes"], _ = limited("decoder", deadline - time.monotonic(), world.device, decodes)
    return report


def read_data(config: Config, world: World, seconds: float) -> tuple[float, int, dict[str, int]]:
    """Read images from all over the training set, the same on every node, for so many seconds, as the loader does but past the
    cache: MB/s of the best batch, how many batches, and a sentence for each damaged image, with its batch. Raises UserError: the set is
    not intact."""
    shards = open_training_set(config.data.path, config.data.mix, readers=world.size)
    chosen = np.linspace(0, len(shards) - 1, min(len(shards), _IMAGES)).astype(int).tolist()
    rates, damaged, began = list[float](), dict[str, int](), time.monotonic()
    for begin in range(0, len(chosen), _BATCH):
        before = time.perf_counter()
        images = shards.read_batch(chosen[begin : begin + _BATCH])
        good = [image for image in images if not isinstance(image, DamagedSample)]
        rates.append(sum(len(image) for image in good) / (time.perf_counter() - before) / 1e6)
        damaged |= {str(image): len(rates) for image in images if isinstance(image, DamagedSample)}
        if time.monotonic() - began > seconds:
            break
    return max(rates), len(rates), damaged


def write_and_read(place: Place) -> float:
    """Write to a folder or a run's store and read it back: MB/s of the best of a few chunks. Raises OSError, StoreFails: as these do, in
    the same words on every node."""
    path, content, rates = place / f".doctor-{node_name()}-{os.getpid()}", os.urandom(_CHUNK), list[float]()
    store = RunStore(place).store if isinstance(place, RemotePath) else None
    try:
        if isinstance(place, Path):
            place.mkdir(exist_ok=True)  # the cache's, in a folder that must be there
        for _ in range(_CHUNKS):
            began = time.perf_counter()
            if store:
                store.put(path.name, content)
                found = bytes(store.fetch(path.name).data)
            else:
                with open(path, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                found = Path(path).read_bytes()
            if found != content:
                raise OSError(errno.EIO, "what was written is not what is read")
            rates.append(2 * _CHUNK / (time.perf_counter() - began) / 1e6)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from None
    finally:
        with suppress(OSError):
            store.delete([path.name]) if store else os.unlink(path)
    return max(rates)


def measure_link(world: World, peer: int) -> tuple[float, float | None]:
    """Measure MB/s to another rank over the run's backend, the best of three; and this node's clock less the peer's in seconds where
    the peer is the lower rank. Collective of the two."""
    first = world.rank < peer

    def trip(buffer: torch.Tensor) -> float:
        began = time.perf_counter()
        for sends in (first, not first):
            dist.send(buffer, peer) if sends else dist.recv(buffer, peer)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    small = torch.zeros(_SMALL, dtype=torch.uint8, device=world.device)
    trip(small)  # connects
    size = torch.tensor([_LARGE if trip(small) < _QUICK else _SMALL], device=world.device)
    dist.send(size, peer) if first else dist.recv(size, peer)
    buffer = torch.zeros(int(size), dtype=torch.uint8, device=world.device)
    rate = 2 * int(size) / min(trip(buffer) for _ in range(3)) / 1e6
    tries = []
    for _ in range(_TRIES):
        asked, theirs = clock(), torch.zeros(1, dtype=torch.float64, device=world.device)
        if first:
            dist.recv(theirs, peer)
            dist.send(theirs.fill_(clock()), peer)
        else:
            dist.send(theirs, peer)
            dist.recv(theirs, peer)
            tries.append((clock() - asked, (clock() + asked) / 2 - float(theirs)))
    return rate, min(tries)[1] if tries else None


def partner(index: int, turn: int, count: int) -> int:
    """Find whom the ``index``-th of an even ``count`` meets in a turn: in ``count - 1`` turns everybody once."""
    others = count - 1
    met = turn * pow(2, -1, others) % others if index == others else (turn - index) % others
    return others if met == index else met
