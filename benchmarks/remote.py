"""Images per second from stores at several latencies, as a share of those from the local disk.

    python benchmarks/remote.py SHARDS [--delays 0 10 50] [--order full] [--batch 64] [--batches 30] [--rounds 3]

SHARDS is a shard set of training images on a disk. A copy of it is served on 127.0.0.1 by nginx, and by moto's S3 server where that
is installed (it is written in Python and answers a few hundred requests per second at most, whoever asks); a proxy in a process of
its own delays every answer. What is measured is the reader, as training has it: threads, batches ahead, checksums, without
decoding. The sources are measured in turns, a loader of each kept open; the median of the rounds counts. --decode measures the whole
loader on the CPU, as fast as training on this machine could ever take images. A row ", cache" is a full ``data.cache`` before the
server with the largest delay.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.stores import BUCKET, NGINX, aws_environment, free_port, nginx, upload, wait_for  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 10, 50], metavar="MS")
    parser.add_argument("--order", choices=("full", "block"), default="full")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=30, help="in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read-ahead", type=int, default=4)
    parser.add_argument("--decode", action="store_true")
    args = parser.parse_args()
    with ExitStack() as stack:
        sources = {"local disk": str(args.shards)}
        caches: dict[str, Path] = {}
        for server, port, path in _servers(args.shards, stack):
            for delay in args.delays:
                sources[f"{server}, {delay:g} ms"] = path.format(port=stack.enter_context(_delayed(port, delay)))
            cached = f"{server}, {max(args.delays):g} ms, cache"
            sources[cached] = sources[f"{server}, {max(args.delays):g} ms"]
            caches[cached] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        readers: dict[str, Source] = {name: _open(args, path, caches.get(name)) for name, path in sources.items()}
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(args.rounds + 1):
            for name, reader in readers.items():
                images, began = 0, time.perf_counter()
                for _ in range(args.batches):
                    images += reader.next()
                if number:  # the first round opens connections and fills the page cache
                    rates[name].append(images / (time.perf_counter() - began))
        for reader in readers.values():
            reader.close()  # while the servers are there
    local = rates["local disk"]
    print(
        f"{args.order} order, batches of {args.batch}, read_ahead {args.read_ahead}, {'decoded' if args.decode else 'read only'}"
    )
    print(f"{'source':24s} {'images/s':>9s} {'of the disk':>12s}")
    for name, each in rates.items():
        share = statistics.median(rate / disk for rate, disk in zip(each, local))
        print(f"{name:24s} {statistics.median(each):9.0f} {share:12.2f}")


class Source(NamedTuple):
    """Batches without end."""

    next: Callable[[], int]  # images of the next batch
    close: Callable[[], None]


def _open(args: argparse.Namespace, path: str, cache: Path | None) -> Source:
    import torch

    from pipeline.config import AugmentConfig, DataConfig
    from pipeline.loader.loader import Loader
    from pipeline.loader.reader import BadSamples, Reader
    from pipeline.shards.files.cache import ShardCache
    from pipeline.shards.shard_set import ShardSet
    from support.batches import train_batches

    if path.startswith("s3://"):  # the store keeps the address that it was opened with
        url, _, port = path.rpartition("@")
        os.environ.update(aws_environment(int(port)))
        path = url
    data = DataConfig(order=args.order, block_size=64, window_blocks=4, read_ahead=args.read_ahead, num_threads=os.cpu_count())
    shards = ShardSet(path, "train", cache=ShardCache(cache) if cache else None)
    if cache:
        shards.files.fill()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 120
        while sum(1 for _ in cache.glob("*.tar")) < len(shards.info.shards):
            assert time.monotonic() < deadline, f"{path} is not in the cache after two minutes"
            time.sleep(0.1)
    batches = train_batches(
        shards, global_batch=args.batch, micro_batch=args.batch, image_size=224, data=data, augment=AugmentConfig()
    )
    if args.decode:
        loader = Loader(batches, data, torch.device("cpu"))
        return Source(lambda: len(next(loader).labels), loader.close)
    reader = Reader(batches, BadSamples(shards, 0), 0, args.read_ahead)
    return Source(lambda: len(reader.next().images), reader.close)


def _servers(shards: Path, stack: ExitStack) -> Iterator[tuple[str, int, str]]:
    """Name, port, and what a URL is made of, of each server that is installed."""
    if NGINX:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shutil.copytree(shards, work / "root" / BUCKET)
        port = stack.enter_context(nginx(work / "root", work / "work"))
        yield "nginx", port, f"http://127.0.0.1:{{port}}/{BUCKET}"
    program = Path(sys.executable).with_name("moto_server")
    if program.exists():
        port = free_port()
        server = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        stack.callback(server.wait)
        stack.callback(server.terminate)
        wait_for(port)
        os.environ.update(aws_environment(port))
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
        upload(shards, "set")
        yield "S3 (moto)", port, f"s3://{BUCKET}/set@{{port}}"


@contextmanager
def _delayed(port: int, milliseconds: float) -> Iterator[int]:
    """A proxy before a server, in a process of its own; gives its port. Without a delay, too: what it costs is not latency."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "http_proxy.py"), str(port), str(milliseconds)]
    proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert proxy.stdout
    try:
        yield int(proxy.stdout.readline())
    finally:
        proxy.terminate()
        proxy.wait()


if __name__ == "__main__":
    main()
