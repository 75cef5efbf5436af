"""One contestant of ``benchmarks/loader.py``: a process that produces batches on request.

    python benchmarks/loader_peers.py NAME --folder FOLDER --shards FOLDER --listing FILE
        [--workers 2] [--batch-size 64] [--timm FOLDER]

Every contestant yields an infinite stream of image batches: float32 (B, 3, 224, 224), normalized, in pageable memory. All draw
random crops from the same distribution (area 0.08-1, ratio 3/4-4/3, ten attempts), flip half of them and resize to 224 pixels,
each with its own random numbers.

The process prints ``ready`` after its first batch, or ``skipped: REASON``. Then, for each line ``TOTAL UNTIMED`` on stdin, it
takes TOTAL batches and prints the wall seconds of all but the first UNTIMED: these were prefetched, and the clock starts when
the queue is in its steady state. The parent measures CPU time.

Imports only PyTorch at the top: a contestant may run in a virtual environment without this project's dependencies.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import torch
from loader_settings import IMAGE_SIZE, Settings, StoredImages, Unavailable
from torch import Tensor

# name -> the function that makes its batches, imported in the process that needs it, and what is passed besides the settings
PEERS: dict[str, tuple[str, dict]] = {
    "ours": ("loader_peers_dali:our_batches", {"full": False}),
    "ours_full": ("loader_peers_dali:our_batches", {"full": True}),
    "dali_native": ("loader_peers_dali:native_batches", {"cubic": True}),
    "dali_native_linear": ("loader_peers_dali:native_batches", {"cubic": False}),
    "pillow": ("loader_peers_pillow:folder_batches", {"full": False}),
    "pillow_full": ("loader_peers_pillow:folder_batches", {"full": True}),
    "webdataset": ("loader_peers_pillow:webdataset_batches", {}),
    "opencv": ("loader_peers_threads:opencv_batches", {"interpolation": "CUBIC"}),
    "opencv_area": ("loader_peers_threads:opencv_batches", {"interpolation": "AREA"}),
    "simplejpeg": ("loader_peers_threads:simplejpeg_batches", {}),
    "spdl": ("loader_peers_threads:spdl_batches", {}),
    "torchvision": ("loader_peers_streams:torchvision_batches", {}),
    "timm": ("loader_peers_streams:timm_batches", {}),
    "litdata": ("loader_peers_streams:litdata_batches", {}),
    "streaming": ("loader_peers_streams:streaming_batches", {}),
    "ffcv": ("loader_peers_ffcv:ffcv_batches", {}),
}


def batches_of(name: str, settings: Settings) -> Iterator[Tensor]:
    """The batches of a contestant. Raises Unavailable or ImportError: it cannot run here."""
    place, options = PEERS[name]
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)(settings, **options)


def check(images: Tensor, batch_size: int) -> None:
    """Check that a contestant delivers the same kind of batches as the others.

    Raises:
        ValueError: another shape or type, or pixels that were not normalized.
    """
    wanted = (batch_size, 3, IMAGE_SIZE, IMAGE_SIZE)
    if tuple(images.shape) != wanted or images.dtype != torch.float32:
        raise ValueError(f"a batch must be {wanted} torch.float32, got {tuple(images.shape)} {images.dtype}")
    # Normalized natural images: mean near 0, deviation near 1. Those on [0, 1] deviate by 0.3, those on [0, 255] by 70.
    if not (images.mean().abs() < 1 and 0.6 < images.std() < 1.7):
        raise ValueError(f"pixels must be normalized, got mean {images.mean():.2f} and deviation {images.std():.2f}")


def serve(batches: Iterator[Tensor], requests: Iterator[str], answer: Callable[[str], None]) -> None:
    """Take batches as the parent asks for them."""
    for line in requests:
        total, untimed = map(int, line.split())
        for _ in range(untimed):
            next(batches)
        started = time.perf_counter()
        for _ in range(total - untimed):
            next(batches)
        answer(f"{time.perf_counter() - started:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--folder", type=Path, required=True, help="the images as <class>/*.JPEG")
    parser.add_argument("--shards", type=Path, required=True, help="the images as a shard set")
    parser.add_argument("--listing", type=Path, required=True, help="the images as a list of JPEGs within files")
    parser.add_argument("--workers", type=int, default=2, help="threads or processes that decode (default: 2)")
    parser.add_argument("--batch-size", type=int, default=64, help="images per batch (default: 64)")
    parser.add_argument("--timm", type=Path, help="folder that holds the package timm")
    args = parser.parse_args()

    # Answers go to the real stdout; library output goes to stderr, so that the parent cannot mistake it for an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(args.workers)
    settings = Settings(StoredImages(args.folder, args.shards, args.listing), args.workers, args.batch_size, args.timm)
    try:
        batches = batches_of(args.name, settings)
        check(next(batches), args.batch_size)
    except (Unavailable, ImportError) as error:
        print(f"skipped: {error}", file=answers)
        return
    print("ready", file=answers)
    serve(batches, iter(sys.stdin.readline, ""), lambda text: print(text, file=answers))


if __name__ == "__main__":
    main()
