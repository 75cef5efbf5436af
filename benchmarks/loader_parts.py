"""Where the CPU time of our loader goes: ``benchmarks/loader.py --parts``.

Each part runs alone over some batches, and its CPU time (all threads of the process) is taken. The sum is
less than what the whole loader takes: threads that hand batches to each other, and caches that they share, cost the rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
from loader_peers_dali import our_source
from loader_settings import IMAGE_SIZE, MEAN, STD, Settings, StoredImages

from pipeline.augment import BatchAugmentation
from pipeline.loader.cpu_transform import Finisher, Normalization, resize_and_crop
from pipeline.loader.dali_graph import decoding_graph, window_inputs

Result = TypeVar("Result")
BATCHES = 4  # per round: their windows and floats fit into memory, and DALI's start costs little


def measure_parts(settings: Settings, full: bool, rounds: int) -> dict[str, float]:
    """CPU milliseconds per image of each part, medians over the rounds.

    Args:
        settings: what to read.
        full: the full recipe.
        rounds: of ``BATCHES`` batches each, after one that is not counted.
    """
    source = our_source(settings, full)
    times: dict[str, list[float]] = {}

    def timed(part: str, work: Callable[[], Result]) -> Result:
        started = time.process_time()
        result = work()
        times.setdefault(part, []).append(1000 * (time.process_time() - started) / (BATCHES * settings.batch_size))
        return result

    finisher = Finisher(settings.batch_size, IMAGE_SIZE, MEAN, STD, settings.workers)
    normalization = Normalization(MEAN, STD)
    floats = torch.empty(BATCHES, settings.batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    feed: list[tuple] = []
    # At depth 1, DALI makes a batch when it is asked for it, not ahead of time.
    graph = decoding_graph(lambda: feed.pop(0), settings.batch_size, settings.workers, 1)

    def one_round(first: int) -> None:
        requests = timed("samples and draws", lambda: [source.request(i) for i in range(first, first + BATCHES)])
        encoded = timed("read and checksum", lambda: [list(map(source.shards.read, request.index)) for request in requests])
        feed[:] = [window_inputs(images, request) for images, request in zip(encoded, requests)]
        decoded = timed("decode the windows (DALI)", lambda: [graph.run()[0] for _ in range(BATCHES)])
        windows = timed("take the windows over", lambda: [[torch.from_dlpack(image) for image in batch] for batch in decoded])
        images = [(request, i, window) for request, batch in zip(requests, windows) for i, window in enumerate(batch)]
        steps: list[tuple[float, ...]] = []
        # Image by image, as in the loader: the caches hold it.
        for (request, i, window), output in zip(images, floats.flatten(0, 1).numpy()):
            marks = [time.process_time()]
            pixels = resize_and_crop(window, request.geometry, i, IMAGE_SIZE)
            marks.append(time.process_time())
            pixels = finisher.flip_and_augment(pixels, request, i, interleaved=False)
            marks.append(time.process_time())
            normalization.write(pixels, output)
            marks.append(time.process_time())
            steps.append(tuple(end - begin for begin, end in pairwise(marks)))
        for part, spent in zip(("resize", "flip, RandAugment", "normalize to float32"), zip(*steps)):
            times.setdefault(part, []).append(1000 * statistics.mean(spent))
        if full:

            def erase_and_mix() -> None:
                for request, batch in zip(requests, floats):
                    for augmentation in request.draws:
                        if isinstance(augmentation, BatchAugmentation):
                            augmentation.apply_(batch, request)

            timed("erase and mix", erase_and_mix)

    for number in range(rounds + 1):
        one_round(number * BATCHES)
    finisher.close()
    return {part: statistics.median(values[1:]) for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True, help="a shard set with the split train")
    parser.add_argument("--full", action="store_true", help="the full recipe")
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds of {BATCHES} batches (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="threads that decode (default: 2)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: 64)")
    args = parser.parse_args()
    torch.set_num_threads(args.workers)
    images = StoredImages(args.shards, args.shards, args.shards)
    parts = measure_parts(Settings(images, args.workers, args.batch_size, None), args.full, args.rounds)
    for part, milliseconds in parts.items():
        print(f"{part}\t{milliseconds:.4f}")
    print(f"sum\t{sum(parts.values()):.4f}")


if __name__ == "__main__":
    main()
