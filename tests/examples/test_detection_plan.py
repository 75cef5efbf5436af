"""What a detection run is made of before any tensor: its keys, its configs, its order of images, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.detection.config import DetectionConfig
from examples.detection.data import mirrored, request
from examples.detection.loop import check_same_run, learning_rate
from pipeline.config import load_config_as
from pipeline.errors import UserError
from pipeline.models import create_model, registry
from pipeline.stream.schedule import Schedule
from support.checkpoints import STATE
from support.launching import REPOSITORY

CONFIGS = sorted((REPOSITORY / "examples" / "detection" / "configs").glob("*_posmlp_?.yaml"))


def load(path: Path, *overrides: str) -> DetectionConfig:
    return load_config_as(DetectionConfig, path, overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_state_the_schedule_of_the_paper(path: Path) -> None:
    """Guards against a 1x run with another schedule than PosMLP's Section 5.5 and mmdetection's 1x."""
    config = load(path)
    assert (config.optim.lr, config.optim.weight_decay, config.train.epochs, config.train.global_batch_size) == (
        1e-4,
        0.067,
        12,
        16,
    )
    assert (config.data.short_side, config.data.long_side, config.train.micro_batch_size) == (800, 1333, 2)
    assert (config.optim.decay_epochs, config.optim.warmup_steps, config.model.batchnorm) == ([8, 11], 500, "frozen")
    assert path.stem == f"{config.model.detector}_{config.model.name}" and config.output_dir == f"runs/{path.stem}"
    assert f"bash launch/local.sh 8 -- examples.detection.train --config {path.relative_to(REPOSITORY)}\n" in path.read_text()


def test_four_configs() -> None:
    assert len(CONFIGS) == 4


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.learning_rate=1", "unknown key 'optim.learning_rate': did you mean 'optim.lr'?"),
        ("model.detector=yolo", "model.detector must be 'retinanet' or 'mask_rcnn', got 'yolo'"),
        ("data.short_side=2000", "data.short_side must be at most data.long_side 1333, got 2000"),
        ("model.init_from=null", "model.batchnorm=frozen requires model.init_from, got null"),
        ("augment.mixup=0.8", "unknown key 'augment'"),
    ],
)
def test_a_wrong_key_is_one_sentence(override: str, said: str) -> None:
    """Guards against the sentences of the training's config, whose keys a detection run does not have."""
    with pytest.raises(UserError) as error:
        load(CONFIGS[0], override)
    assert said in str(error.value)


def config(**train: object) -> DetectionConfig:
    return DetectionConfig.model_validate({"train": {"global_batch_size": 8, **train}})


def test_a_step_takes_the_same_images_on_any_number_of_processes() -> None:
    """Guards against images that are lost or repeated when a run goes on with more processes, and an epoch that is not a permutation."""
    its = config()
    images = [
        np.concatenate([request(its, 20, step, part, parts).sample for part in range(parts)])
        for parts in (1, 2, 8)
        for step in range(5)
    ]
    of_one = np.concatenate(images[:5])
    assert all(np.array_equal(of_one, np.concatenate(images[first : first + 5])) for first in (5, 10))
    assert sorted(of_one[:20]) == sorted(of_one[20:]) == list(range(20))
    assert of_one[:20].tolist() != of_one[20:].tolist()


def test_what_is_drawn_depends_on_the_place_alone() -> None:
    """Guards against flips and sampled anchors that a restart or another split draws anew."""
    whole, parts = request(config(), 20, 3, 0, 1), [request(config(), 20, 3, part, 4) for part in range(4)]
    for name in ("flip", "torch_seed", "epoch", "position"):
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(each, name) for each in parts]))
    many = request(config(global_batch_size=2000), 20, 0, 0, 1)
    assert 0.45 < np.mean(many.flip) < 0.55
    assert len(set(many.torch_seed.tolist())) == 2000


def test_the_schedule_of_the_learning_rate() -> None:
    """Guards against decays at another step than that of the epoch's end, and a warm-up that jumps."""
    its = DetectionConfig()
    schedule = Schedule(images=117_266, global_batch_size=16, epochs=12, max_steps=None)  # COCO's images with boxes
    assert schedule.last_step == 87_950
    rates = [learning_rate(step, schedule, its) for step in (0, 250, 499, 500, 58_632, 58_633, 80_620, 80_621)]
    assert rates == pytest.approx([1e-7, 5.005e-5, 9.98002e-5, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6])


def test_a_mirrored_image_keeps_its_boxes() -> None:
    """Guards against boxes that are flipped about another axis than their pixels."""
    image = torch.zeros(3, 6, 10, dtype=torch.uint8)
    image[:, 1:3, 2:5] = 9
    target = {"boxes": torch.tensor([[2.0, 1, 5, 3]]), "labels": torch.tensor([1]), "masks": image[:1] // 9}
    flipped, its = mirrored(image, target)
    x1, y1, x2, y2 = its["boxes"][0].int().tolist()
    assert bool((flipped[:, y1:y2, x1:x2] == 9).all()) and int((flipped == 9).sum()) == 18
    assert torch.equal(its["masks"][0] * 9, flipped[0])


def test_a_run_goes_on_with_its_keys_and_its_data() -> None:
    """Guards against a resumed run whose second half has another learning rate, or other images."""
    its = config()
    keys = {**its.for_package(2).model_dump(mode="json"), "detection": its.model_dump(mode="json")}
    state = replace(STATE, config=keys, data={"samples": 20, "fingerprint": "digest"})
    check_same_run(its.model_copy(update={"log": its.log.model_copy(update={"every_steps": 7})}), "digest", state)
    with pytest.raises(UserError, match="was started with other annotations"):
        check_same_run(its, "another", state)
    changed = its.model_copy(update={"optim": its.optim.model_copy(update={"lr": 1.0})})
    said = "was started with optim.lr=0.0001, got 1.0: set it back, or choose another output_dir."
    with pytest.raises(UserError, match=said):
        check_same_run(changed, "digest", state)
    with pytest.raises(UserError, match="has the checkpoints of a classifier: choose another output_dir."):
        check_same_run(its, "digest", replace(state, config=its.for_package(2).model_dump(mode="json")))


@pytest.fixture
def narrow() -> Iterator[str]:
    """The name of a small backbone, which this process knows for one test."""
    import support.narrow_detector  # noqa: F401  # registers it

    yield "posmlp_narrow"
    del registry.registered["posmlp_narrow"]


def test_the_backbone_starts_from_a_classifier(narrow: str, tmp_path: Path) -> None:
    """Guards against a detector that is trained from scratch without a word, and a sentence that names another program's key."""
    from examples.detection.model import build_features

    classifier = create_model(narrow, num_classes=7)
    torch.nn.init.uniform_(classifier.stem.norms[0].running_mean)
    torch.save(classifier.state_dict(), tmp_path / "weights.pth")
    model = {"name": narrow, "init_from": str(tmp_path / "weights.pth"), "batchnorm": "frozen"}
    features, notes = build_features(DetectionConfig.model_validate({"model": model}), fresh=True)
    theirs = classifier.state_dict()
    own = {name: value for name, value in features.state_dict().items() if not name.startswith("output_norms.")}
    assert own.keys() == {name for name in theirs if not name.startswith("head.")}
    assert all(torch.equal(value, theirs[name]) for name, value in own.items())
    assert "weights.pth" in notes[0]
    assert not features.train().stem.norms[0].training  # it keeps the statistics
    model["init_from"] = str(tmp_path / "none")
    with pytest.raises(UserError, match="model.init_from .*none does not exist: pass a run folder or a file"):
        build_features(DetectionConfig.model_validate({"model": model}), fresh=True)
