"""What the final weights of a run saw, put together from the log of samples of all its starts; and how far two runs are apart."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.checkpoint.folder import latest_step, step_folder
from pipeline.checkpoint.weights import read_weights

Image = tuple[int, int, int, str]  # epoch, position, sample, augmentation


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    time: float  # seconds since 1970
    begins_after: int  # step of the newest checkpoint then; 0 without one
    world_size: int


def what_the_weights_saw(run: Path, starts: list[Start], last_step: int) -> dict[int, list[Image]]:
    """The images of every step that led to the checkpoint of ``last_step``, sorted.

    That checkpoint is the last start's work from the checkpoint on which it began; that one is the work of the last start that
    began before it; and so on. What other starts did in between was lost with them.

    Raises:
        AssertionError: a start began elsewhere than at the newest checkpoint, or a step's record lacks a rank.
    """
    records = _records(run, starts)
    seen, end = {}, last_step
    while end:
        number = max(i for i, start in enumerate(starts) if start.begins_after < end)
        start = starts[number]
        for step in range(start.begins_after + 1, end + 1):
            by_rank = records[number][step]
            assert sorted(by_rank) == list(range(start.world_size)), f"step {step} was recorded by ranks {sorted(by_rank)}"
            seen[step] = sorted(image for images in by_rank.values() for image in images)
        end = start.begins_after
    return dict(sorted(seen.items()))


def _records(run: Path, starts: list[Start]) -> list[dict[int, dict[int, list[Image]]]]:
    """Of every start: step -> rank -> images."""
    times = [start.time for start in starts]
    records: list[dict[int, dict[int, list[Image]]]] = [{} for _ in starts]
    begun = json.loads((run / "environment.json").read_text())
    numbers: dict[int, int] = {}  # by the record, which counts no start that was killed before it -> by the test
    for path in sorted((run / "samples").glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in map(json.loads, path.read_text().splitlines()):
            number = bisect_right(times, line["time"]) - 1
            assert numbers.setdefault(line["start"], number) == number, f"{path}: two starts have the number {line['start']}"
            expected, began = starts[number].begins_after + 1, begun[line["start"] - 1]["first_step"]
            assert began == expected, f"{path}: a start began with step {began}, not {expected}"
            ranks = records[number].setdefault(line["step"], {})
            assert rank not in ranks, f"{path}: step {line['step']} was taken twice in one start"
            ranks[rank] = list(zip(line["epoch"], line["position"], line["sample"], line["augmentation"]))
    return records


def assert_each_image_once(seen: dict[int, list[Image]], images_per_epoch: int, global_batch_size: int) -> None:
    """Steps 1 to the last saw positions 0, 1, 2, ... of the epochs, each once."""
    assert list(seen) == list(range(1, len(seen) + 1))
    numbers = [epoch * images_per_epoch + position for images in seen.values() for epoch, position, *_ in images]
    assert sorted(numbers) == list(range(len(seen) * global_batch_size))


def same_files(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints hold the same bytes: weights, both moments, averages, BatchNorm statistics."""
    first, second = (
        {path.name: path.read_bytes() for path in step_folder(run, latest_step(run)).glob("part-*")} for run in (a, b)
    )
    return bool(first) and latest_step(a) == latest_step(b) and first == second


def distance(a: Path, b: Path, kind: str = "model", step_of_b: int | None = None) -> float:
    """|a - b| / |b| over all weights and BatchNorm statistics of the newest checkpoints."""
    first, second = read_weights(a).choose(kind), read_weights(b, step_of_b).choose(kind)
    assert first.keys() == second.keys()
    difference = torch.stack([(first[name].double() - second[name].double()).norm() for name in second]).norm()
    return (difference / torch.stack([value.double().norm() for value in second.values()]).norm()).item()


def loss_difference(a: list[dict], b: list[dict]) -> float:
    """Largest relative difference between the losses of two lists of steps."""
    assert [row["step"] for row in a] == [row["step"] for row in b]
    return max(abs(x["loss"] - y["loss"]) / abs(y["loss"]) for x, y in zip(a, b))
