"""COCO files: each mistake is one sentence, and what data sets in use do contain follows a rule. Needs no torchvision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.detection.data import CocoSet, check_sets, read_coco, read_image
from pipeline.errors import UserError

SQUARE = [[10, 10, 40, 10, 40, 30, 10, 30]]


def annotation(number: int, **changes: Any) -> dict:
    entry = {"id": number, "image_id": 7, "category_id": 5, "bbox": [10, 10, 30, 20], "area": 600, "iscrowd": 0}
    return {**entry, "segmentation": SQUARE, **changes}


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """A correct file: images 7 and 3 of 60x40 pixels, the second without boxes, categories 5 and 2."""
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(tmp_path / "images" / name)
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "width": 60, "height": 40},
            {"id": 3, "file_name": "b.png", "width": 60, "height": 40},
        ],
        "annotations": [annotation(1)],
        "categories": [{"id": 5, "name": "dog"}, {"id": 2, "name": "cat"}],
    }


def read(folder: Path, tree: object, masks: bool = True) -> CocoSet:
    path = folder / "set.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return read_coco(path, folder / "images", masks, "data.train_annotations")


def test_a_correct_file(tmp_path: Path, tree: dict) -> None:
    """Guards against labels in the order of the file, and boxes as x, y, width, height."""
    coco = read(tmp_path, tree)
    assert ([image.id for image in coco.images], [*coco.categories.items()]) == ([3, 7], [(2, "cat"), (5, "dog")])
    (image,) = coco.trained
    assert (image.boxes, image.labels, image.segmentations) == ([(10, 10, 40, 30)], [1], [SQUARE])
    assert coco.notes == [
        f"note: {tmp_path / 'set.json'}: evaluated but not trained on, images without a box to train on: 1 (ids 3)"
    ]


def test_boxes_are_clipped_and_those_of_no_area_are_left_out(tmp_path: Path, tree: dict) -> None:
    """Guards against a box of no area, which makes a loss infinite, and one beyond the image, which no anchor fits."""
    boxes = [[-10, -5, 30, 20], [50, 30, 30, 30], [10, 10, 0, 5], [10, 10, 20, 0.5], [70, 10, 5, 5], [59.5, 0, 10, 10]]
    tree["annotations"] = [annotation(number, bbox=box) for number, box in enumerate(boxes, 1)]
    coco = read(tmp_path, tree)
    assert coco.trained[0].boxes == [(0, 0, 20, 15), (50, 30, 60, 40)]
    assert (
        "not trained on, boxes outside their image or with a side under 1 pixel within it: 4 (ids 3, 4, 5, ...)"
        in coco.notes[0]
    )


def test_crowds_are_not_trained_on(tmp_path: Path, tree: dict) -> None:
    """Guards against the box around a crowd being learned as one object."""
    tree["annotations"].append(annotation(2, iscrowd=1, segmentation={"size": [40, 60], "counts": [0, 2400]}))
    coco = read(tmp_path, tree)
    assert len(coco.trained[0].boxes) == 1
    assert "not trained on, ignored in the evaluation, crowds: 1 (ids 2)" in coco.notes[0]


def test_nothing_to_train_on(tmp_path: Path, tree: dict) -> None:
    tree["annotations"] = []
    with pytest.raises(UserError, match="must have at least one box to train on, got none: set data.train_annotations"):
        check_sets(read(tmp_path, tree), read(tmp_path, tree))


def change(part: str, **values: Any) -> Callable[[dict], object]:
    """Set keys of the first entry of a part, or remove those that are None."""

    def apply(tree: dict) -> None:
        for name, value in values.items():
            if value is None:
                del tree[part][0][name]
            else:
                tree[part][0][name] = value

    return apply


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            change("annotations", category_id=9),
            "annotation 1 must be of a category that 'categories' lists (2, 5), got 9: add the category",
        ),
        (
            change("annotations", image_id=8),
            "annotation 1 is of image 8, which 'images' does not list: add that image or remove it.",
        ),
        (
            change("annotations", bbox=None),
            "set.json: annotations.0.bbox is missing: correct the file, or data.train_annotations.",
        ),
        (change("annotations", area=None), "annotations.0.area is missing"),
        (change("annotations", iscrowd=None), "annotations.0.iscrowd is missing"),
        (change("annotations", iscrowd=2), "annotations.0.iscrowd must be 0 or 1, got 2"),
        (change("annotations", id=None), "annotations.0.id is missing"),
        (change("annotations", id="1"), "annotations.0.id must be a valid integer, got '1'"),
        (change("annotations", bbox=[1, 2, 3]), "annotations.0.bbox.3 is missing"),
        (change("annotations", bbox=[1, 2, float("nan"), 3]), "annotations.0.bbox.2 must be a finite number, got nan"),
        (change("annotations", bbox=[10, 10, -5, 3]), "annotations.0.bbox.2 must be greater than or equal to 0, got -5"),
        (
            change("annotations", segmentation=None),
            "annotation 1 must have a segmentation for the masks of Mask R-CNN, got none",
        ),
        (change("annotations", segmentation=[]), "annotation 1 must have a segmentation"),
        (change("annotations", segmentation=[[1, 2, 3, 4]]), "annotation 1 must have polygons of at least three points"),
        (
            change("annotations", segmentation={"size": [60, 40], "counts": [9]}),
            "or counts with the size [40, 60], as segmentation, got {'size': [60, 40]",
        ),
        (change("images", file_name="c.png"), "set.json lists it as image 7"),
        (change("images", file_name=3), "images.0.file_name must be a valid string, got 3"),
        (change("images", width=None), "images.0.width is missing"),
        (change("images", width=0), "images.0.width must be greater than or equal to 1, got 0"),
        (change("images", id=3), "images must have distinct ids, got 3 twice: renumber them"),
        (change("categories", id=2), "categories must have distinct ids, got 2 twice"),
        (lambda tree: tree["annotations"].append(annotation(1)), "annotations must have distinct ids, got 1 twice"),
        (lambda tree: tree.pop("categories"), "set.json: categories is missing"),
        (lambda tree: tree.update(annotations={}), "annotations must be a valid array, got {}"),
        (lambda tree: tree["annotations"].append(3), "annotations.1 must be an object, got 3"),
        (lambda tree: tree.update(categories=[], annotations=[]), "categories must have at least 1 item, got []"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, tree: dict, damage: Callable[[dict], object], said: str) -> None:
    """Guards against a KeyError of pycocotools, or a run that trains on what the file does not mean."""
    damage(tree)
    with pytest.raises(UserError) as error:
        read(tmp_path, tree)
    assert said in str(error.value)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_masks_are_asked_for_only_where_they_are_learned(tmp_path: Path, tree: dict) -> None:
    """Guards against a RetinaNet that cannot train on boxes alone."""
    del tree["annotations"][0]["segmentation"]
    assert read(tmp_path, tree, masks=False).trained[0].segmentations == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "set.json: the file: Invalid JSON: EOF"),
        ("[1]", "set.json: the file must be an object, got .1.: correct the file"),
        ("\x00", "set.json: the file: Invalid JSON"),
    ],
)
def test_a_file_that_is_no_coco_file(tmp_path: Path, tree: dict, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="data.val_annotations .*x.json cannot be read .No such file or directory.: correct the key"
    ):
        read_coco(tmp_path / "x.json", tmp_path, False, "data.val_annotations")


def test_both_splits_have_the_same_categories(tmp_path: Path, tree: dict) -> None:
    """Guards against an AP of zero because 2 is a cat here and a dog there."""
    train = read(tmp_path, tree)
    tree["categories"][1]["name"] = "horse"
    with pytest.raises(UserError, match="must have the categories of .*, got 'horse' as category 2 instead of 'cat'"):
        check_sets(train, read(tmp_path, tree))


def test_an_image_that_is_not_as_described(tmp_path: Path, tree: dict) -> None:
    """Guards against boxes that are right for another version of the image, and a traceback of Pillow."""
    image = read(tmp_path, tree).trained[0]
    assert read_image(image).shape == (3, 40, 60)
    image.file.write_bytes(image.file.read_bytes()[:60])
    with pytest.raises(UserError, match="a.png cannot be decoded .*: restore it"):
        read_image(image)
    Image.fromarray(np.zeros((60, 40, 3), np.uint8)).save(image.file)
    with pytest.raises(UserError, match="a.png must have 60x40 pixels, as its COCO file says, got 40x60"):
        read_image(image)
