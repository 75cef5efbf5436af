"""Compute average precision (AP) by COCO's own program, pycocotools, over the images of all ranks."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.detection.coco import CocoSet
from examples.detection.config import DetectionConfig
from examples.detection.loader import read_image
from examples.detection.model import Detector
from pipeline.cluster.agreement import do_in_main, raise_on_all
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.world import World
from pipeline.errors import UserError
from pipeline.files import replace_text, write_error

RESULTS = "detections.json"  # of the newest evaluation, in COCO's format for results
_NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")  # the first six of COCOeval.stats
_PIXEL_THRESHOLD = 0.5  # a mask's probability above which a pixel belongs to it (He et al., ICCV 2017, Sec. 3.1)


def evaluate(
    config: DetectionConfig, model: Detector, coco: CocoSet, world: World, heartbeat: Heartbeat, step: int
) -> dict[str, float]:
    """Detect in all images of ``coco`` and score the detections. Collective; leaves the model in eval mode.

    Each rank writes its detections to the run folder, which all share; rank 0 puts them together as ``detections.json``.

    Returns:
        Percent by name on every rank: AP, AP50, ... of boxes, and mask_AP, ... where the detector has masks.

    Raises:
        UserError: on every rank: an image cannot be read, or a file cannot be written.
    """
    error = None
    try:
        found = _detect(config, model, coco, world, heartbeat, step)
        _write(_part(config, world.rank), found)
    except UserError as problem:
        error = problem
    raise_on_all(error, world)
    heartbeat.at(step, "evaluating")
    scores = do_in_main(lambda: _score_all(config, coco, world.size), world)
    return world.gather(scores)[0]


def _detect(
    config: DetectionConfig, model: Detector, coco: CocoSet, world: World, heartbeat: Heartbeat, step: int
) -> list[dict[str, Any]]:
    """This rank's part of the images: every ``world.size``-th."""
    model.eval()
    first_label = 1 if config.model.detector == "mask_rcnn" else 0
    mine, size, found = coco.images[world.rank :: world.size], config.eval.batch_size, []
    with torch.no_grad():
        for first in range(0, len(mine), size):
            heartbeat.at(step, "evaluating")
            part = mine[first : first + size]
            pixels = [read_image(image).to(world.device).float().div_(255) for image in part]
            for image, detected in zip(part, model(pixels)):
                found += _as_results(image.id, detected, coco.category_ids, first_label)
    return found


def _as_results(image_id: int, detected: dict[str, torch.Tensor], category_ids: list[int], first_label: int) -> list[dict]:
    """An image's detections in COCO's format for results."""
    boxes = detected["boxes"].cpu().double()
    boxes[:, 2:] -= boxes[:, :2]  # x, y, width, height
    rows = zip(detected["labels"].tolist(), detected["scores"].tolist(), boxes.tolist())
    results = [
        {
            "image_id": image_id,
            "category_id": category_ids[label - first_label],
            "bbox": [round(value, 2) for value in box],
            "score": score,
        }
        for label, score, box in rows
    ]
    if "masks" in detected:
        from pycocotools import mask

        drawn = (detected["masks"][:, 0] > _PIXEL_THRESHOLD).cpu().numpy().astype(np.uint8)  # (n, H, W)
        for result, pixels in zip(results, drawn):
            encoded = mask.encode(np.asfortranarray(pixels))
            result["segmentation"] = {"size": encoded["size"], "counts": encoded["counts"].decode()}
    return results


def _score_all(config: DetectionConfig, coco: CocoSet, ranks: int) -> dict[str, float]:
    found = []
    for rank in range(ranks):
        part = _part(config, rank)
        found += json.loads(part.read_text())
        part.unlink()
    _write(Path(config.output_dir) / RESULTS, found)
    scores = score(coco.tree, found, "bbox")
    if config.model.detector == "mask_rcnn":
        scores |= {f"mask_{name}": value for name, value in score(coco.tree, found, "segm").items()}
    return scores


def score(tree: dict[str, Any], found: list[dict[str, Any]], kind: str) -> dict[str, float]:
    """COCO's metrics in percent.

    Args:
        tree: the ground truth, a COCO file.
        found: results; may be empty.
        kind: "bbox" or "segm".

    Returns:
        By the names of ``_NAMES``, without the sizes of which there is no ground truth; -100 without any, as pycocotools has it.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found:  # pycocotools cannot load an empty list
        return dict.fromkeys(_NAMES, 0.0)
    if kind == "segm":  # beside a box pycocotools would take an object's area from that
        found = [{key: value for key, value in each.items() if key != "bbox"} for each in found]
    with redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = deepcopy(tree)  # pycocotools writes into it
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(deepcopy(found)), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    named = zip(_NAMES, evaluation.stats.tolist())
    return {name: 100 * value for name, value in named if value >= 0 or "_" not in name}


def _part(config: DetectionConfig, rank: int) -> Path:
    return Path(config.output_dir) / f".detections-{rank:05d}.json"


def _write(path: Path, found: list[dict[str, Any]]) -> None:
    try:
        replace_text(path, json.dumps(found))
    except OSError as error:
        raise write_error(path, error) from None
