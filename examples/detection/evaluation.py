"""Compute average precision (AP) by COCO's own program, pycocotools, over the images of all ranks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.detection.coco import CocoSet
from examples.detection.config import DetectionConfig
from examples.detection.data import read_image
from examples.detection.model import Detector
from pipeline.cluster.agreement import do_in_main, raise_on_all
from pipeline.cluster.world import World
from pipeline.errors import UserError
from pipeline.files import replace_text, write_error

RESULTS = "detections.json"  # of the newest evaluation, in COCO's format for results
_NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")  # the first six of COCOeval.stats
_PIXEL_THRESHOLD = 0.5  # a mask's probability above which a pixel belongs to it (He et al., ICCV 2017, Sec. 3.1)
Found = list[dict[str, Any]]  # detections in COCO's format for results


def evaluate(
    config: DetectionConfig, model: Detector, coco: CocoSet, world: World, alive: Callable[[], None]
) -> dict[str, float]:
    """Detect in all images of ``coco`` and score the detections. Collective; leaves the model in eval mode.

    Each rank writes its detections to the run folder, which all share; rank 0 puts them together as ``detections.json``. Before
    each batch, ``alive`` reports that the rank does not hang.

    Returns:
        Percent by name on every rank: AP, AP50, ... of boxes, and mask_AP, ... where the detector has masks.

    Raises:
        UserError: on every rank: an image cannot be read, or a file cannot be written.
    """
    folder, error = Path(config.output_dir), None
    parts = [folder / f".detections-{rank:05d}.json" for rank in range(world.size)]
    try:
        _write(parts[world.rank], _detect(config, model, coco, world, alive))
    except UserError as problem:
        error = problem
    raise_on_all(error, world)

    def score_all() -> dict[str, float]:
        found = [detection for part in parts for detection in json.loads(part.read_text())]
        for part in parts:
            part.unlink()
        _write(folder / RESULTS, found)
        scores = score(coco.path, found, "bbox")
        if config.has_masks:
            scores |= {f"mask_{name}": value for name, value in score(coco.path, found, "segm").items()}
        return scores

    alive()
    return world.from_main(do_in_main(score_all, world))


@torch.no_grad()
def _detect(config: DetectionConfig, model: Detector, coco: CocoSet, world: World, alive: Callable[[], None]) -> Found:
    """In this rank's part of the images: every ``world.size``-th."""
    model.eval()
    mine, size, found = coco.images[world.rank :: world.size], config.eval.batch_size, []
    category_ids = [-1, *coco.category_ids] if config.has_masks else coco.category_ids  # with masks, label 0 is the background
    for first in range(0, len(mine), size):
        alive()
        part = mine[first : first + size]
        pixels = [read_image(image).to(world.device).float().div_(255) for image in part]
        for image, detected in zip(part, model(pixels)):
            found += _as_results(image.id, detected, category_ids)
    return found


def _as_results(image_id: int, detected: dict[str, torch.Tensor], category_ids: list[int]) -> Found:
    """An image's detections; ``category_ids`` by label."""
    boxes = detected["boxes"].cpu().double()
    boxes[:, 2:] -= boxes[:, :2]  # x, y, width, height
    results = [
        {"image_id": image_id, "category_id": category_ids[label], "bbox": [round(value, 2) for value in box], "score": score}
        for label, score, box in zip(detected["labels"].tolist(), detected["scores"].tolist(), boxes.tolist())
    ]
    if "masks" in detected:
        from pycocotools import mask

        drawn = (detected["masks"][:, 0] > _PIXEL_THRESHOLD).cpu().numpy().astype(np.uint8)  # (n, H, W)
        for result, pixels in zip(results, drawn):
            encoded = mask.encode(np.asfortranarray(pixels))
            result["segmentation"] = {"size": encoded["size"], "counts": encoded["counts"].decode()}
    return results


def score(truth: Path, found: Found, kind: str) -> dict[str, float]:
    """COCO's metrics in percent for a COCO file and a ``kind``, "bbox" or "segm".

    By the names of ``_NAMES``, without the sizes of which there is no ground truth; -100 without any, as pycocotools has it.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found:  # pycocotools cannot load an empty list
        return dict.fromkeys(_NAMES, 0.0)
    beside = "bbox" if kind == "segm" else ""  # beside a box pycocotools would take an object's area from that
    copies = [{key: value for key, value in each.items() if key != beside} for each in found]  # it writes into them
    with redirect_stdout(io.StringIO()):
        known = COCO(str(truth))
        evaluation = COCOeval(known, known.loadRes(copies), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    named = zip(_NAMES, evaluation.stats.tolist())
    return {name: 100 * value for name, value in named if value >= 0 or "_" not in name}


def _write(path: Path, found: Found) -> None:
    try:
        replace_text(path, json.dumps(found))
    except OSError as error:
        raise write_error(path, error) from None
