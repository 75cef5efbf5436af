"""Images per second of ``pipeline.predict`` on a val set's files, against ``pipeline.evaluate`` on its shards and against a Pillow loop.

    python benchmarks/predict.py --images FOLDER [--checkpoint FILE]

FOLDER holds <class>/*.JPEG. The three take turns for --rounds rounds, each in a process of its own, with the same weights, batch size
and threads; the first --warm-up batches of a round are not counted, so that starts and caches are out of it. What is measured: the time
from the first counted batch to the last, of a pass that decodes, resizes, classifies and notes the result of every image.

    predict            pipeline.predict's pass over the JPEG files, rows written and merged into a CSV file
    evaluate           pipeline.evaluate's pass over shards of the same files
    Pillow, PyTorch    Image.open, resize and centre crop as torchvision does them, in the workers of a DataLoader; the same model

On a CPU all three share the cores with the model: a smaller model shows the differences in decoding, a larger one hides them.

Examples:
    python benchmarks/predict.py --images /data/imagenet/val
    python benchmarks/predict.py --images /data/imagenet/val --checkpoint runs/pervit_t --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

WAYS = ("predict", "evaluate", "pillow")
NAMES = {"predict": "predict, JPEG files", "evaluate": "evaluate, shards", "pillow": "Pillow, PyTorch's DataLoader"}
SMALL = {"name": "pervit_t", "image_size": 224, "switches": {"widths": [16, 16, 16, 16]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="folder with <class>/*.JPEG")
    parser.add_argument("--checkpoint", type=Path, help="default: PerViT-T of a quarter of its width, random weights")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=2, help="batches of a round that are not counted")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        found = compare(args, Path(scratch))
    print(f"\n{'':30}{'images/s':>10}{'CPU s':>8}{'time, predict = 1':>20}{'CPU time':>10}   medians of {args.rounds} rounds")
    for way in WAYS:
        rate, cpu = (statistics.median(round_[way][key] for round_ in found) for key in ("images_per_s", "cpu_s"))
        ratio = statistics.median(round_["predict"]["images_per_s"] / round_[way]["images_per_s"] for round_ in found)
        share = statistics.median(round_[way]["cpu_s"] / round_["predict"]["cpu_s"] for round_ in found)
        print(f"{NAMES[way]:30}{rate:10.1f}{cpu:8.1f}{ratio:20.2f}{share:10.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def compare(args: argparse.Namespace, scratch: Path) -> list[dict[str, dict]]:
    """The rounds: way -> its numbers."""
    classes = sorted(entry.name for entry in args.images.iterdir() if entry.is_dir())
    checkpoint = args.checkpoint or write_small_model(scratch / "small.safetensors", classes)
    shard = ["data_prep.shard_imagenet", "--source", args.images, "--split", "val", "--output", scratch / "shards"]
    subprocess.run([sys.executable, "-m", *map(str, shard)], check=True, stdout=subprocess.DEVNULL)
    rounds = []
    for number in range(args.rounds):
        turn: dict[str, dict] = {}
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            options = ["--images", args.images, "--checkpoint", checkpoint, "--shards", scratch / "shards", "--way", way]
            options += ["--batch-size", args.batch_size, "--warm-up", args.warm_up]
            said = subprocess.run([sys.executable, __file__, *map(str, options)], check=True, capture_output=True, text=True)
            turn[way] = json.loads(said.stdout.splitlines()[-1])
            print(f"round {number + 1}, {NAMES[way]}: {turn[way]['images_per_s']:.1f} images/s", flush=True)
        rounds.append(turn)
    return rounds


def write_small_model(path: Path, classes: list[str]) -> Path:
    from pipeline.models import create_model
    from pipeline.models.weights.exported import Description, write_exported

    model = create_model(SMALL["name"], len(classes), SMALL["image_size"], switches=SMALL["switches"])
    described = (SMALL["name"], len(classes), SMALL["image_size"], SMALL["switches"], classes, [0.485, 0.456, 0.406])
    rest = ([0.229, 0.224, 0.225], 0.9, "fp32", 0, "model", "ours")
    write_exported(path, model.state_dict(), Description(*described, *rest))  # type: ignore[arg-type]
    return path


class Clock:
    """Counts images and CPU seconds, of this process and its children, from the end of the warm-up on."""

    def __init__(self, warm_up: int) -> None:
        self._left, self.images = warm_up, 0
        self._start = self._cpu = 0.0

    def batch(self, images: int) -> None:
        """A batch is done."""
        if self._left > 0:
            self._left -= 1
            self._start, self._cpu = time.perf_counter(), cpu_seconds()
        else:
            self.images += images

    def result(self) -> dict:
        seconds = time.perf_counter() - self._start
        return {"images_per_s": self.images / seconds, "cpu_s": cpu_seconds() - self._cpu, "images": self.images}


def cpu_seconds() -> float:
    """Of this process and its children, those that have ended among them."""
    import psutil

    own, ended = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    living = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(used.ru_utime + used.ru_stime for used in (own, ended)) + sum(used.user + used.system for used in living)


def measure(args: argparse.Namespace) -> dict:
    """One pass of one way."""
    import torch

    from pipeline.cluster.rendezvous import init_world
    from pipeline.config import config_from_dict
    from pipeline.inference.trained import read_trained

    trained = read_trained(args.checkpoint)
    config = config_from_dict({**trained.config.model_dump(), "eval": {"batch_size": args.batch_size}}, source="--batch-size")
    model, clock, world = trained.build_model(), Clock(args.warm_up), init_world()
    model.to(world.device)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch)
        clock.batch(len(batch))
        return scores

    passes: dict[str, Callable[[], None]] = {
        "predict": lambda: predict_files(args, trained, config, world, forward),
        "evaluate": lambda: evaluate_shards(args, config, world, forward),
        "pillow": lambda: pillow_loop(args, config, world, forward),
    }
    with torch.inference_mode():
        passes[args.way]()
    return clock.result()


def predict_files(args, trained, config, world, forward) -> None:  # type: ignore[no-untyped-def]
    from pipeline.inference.evaluation import evaluation_loader
    from pipeline.inference.image_list import ImageList, find_images
    from pipeline.inference.prediction import RankRows, predict
    from pipeline.inference.prediction_table import Names, prediction_dtype, write_rows

    images = ImageList(find_images([str(args.images)]), trained.classes)
    loader = evaluation_loader(images, config, world)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "rows.csv")
        with RankRows(path, prediction_dtype(5), loader.batches, world) as rows:
            predict(forward, 5, loader, images, rows)
            rows.publish(lambda merged: write_rows(path, merged, Names(images.key, trained.classes, trained.shown)))
    loader.close()


def evaluate_shards(args, config, world, forward) -> None:  # type: ignore[no-untyped-def]
    from pipeline.inference.evaluation import evaluate, evaluation_loader
    from pipeline.shards.shard_set import ShardSet

    loader = evaluation_loader(ShardSet(args.shards, "val"), config, world)
    evaluate(forward, loader, world)
    loader.close()


def pillow_loop(args, config, world, forward) -> None:  # type: ignore[no-untyped-def]
    import torch
    from torch.utils.data import DataLoader

    files = sorted(str(path) for path in args.images.rglob("*.JPEG"))
    size, short = config.model.image_size, int(config.model.image_size / config.data.eval_crop)
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.data.mean, config.data.std))
    workers = len(os.sched_getaffinity(0))
    found = []
    for batch in DataLoader(PillowImages(files, size, short, mean, std), args.batch_size, num_workers=workers):
        scores = forward(batch.to(world.device))
        found.append(scores.softmax(dim=1).topk(min(5, scores.shape[1]), dim=1))


class PillowImages:
    """A data set as torchvision's users write it: ``Resize``, ``CenterCrop``, ``ToTensor``, ``Normalize``, with the same calls."""

    def __init__(self, files: Iterable[str], size: int, short: int, mean, std) -> None:  # type: ignore[no-untyped-def]
        self._files, self._size, self._short, self._mean, self._std = list(files), size, short, mean, std

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int):  # type: ignore[no-untyped-def]
        import numpy as np
        import torch
        from PIL import Image

        with Image.open(self._files[index]) as file:
            image = file.convert("RGB")
        scale = self._short / min(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
        left, top = (round((side - self._size) / 2) for side in image.size)
        pixels = torch.from_numpy(np.array(image.crop((left, top, left + self._size, top + self._size))))  # (S, S, 3) uint8
        return pixels.permute(2, 0, 1).contiguous().float().div(255).sub_(self._mean).div_(self._std)

    def __iter__(self) -> Iterator:
        return (self[index] for index in range(len(self)))


if __name__ == "__main__":
    main()
