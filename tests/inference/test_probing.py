"""``pervit probe``: the features of ``load``, and scikit-learn's classifiers on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import load
from pipeline.inference import probing
from pipeline.inference.probing import Labelled
from support.ranks import run_forked
from support.small_model import write_model

CLASSES = 4


@pytest.fixture(scope="module")
def halves() -> tuple[Labelled, Labelled]:
    """Clouds that overlap, of different length, with more images of some classes."""
    rng = np.random.default_rng(0)
    labels = np.sort(rng.choice(CLASSES, 400, p=[0.4, 0.3, 0.2, 0.1]))
    features = rng.normal(size=(CLASSES, 12))[labels] + rng.normal(size=(400, 12)) * rng.uniform(0.5, 2, (400, 1))
    rows = Labelled(torch.from_numpy(features), torch.from_numpy(labels))
    order = rng.permutation(400)
    return rows.part(order[:250]), rows.part(order[250:])


def test_against_scikit_learn(halves: tuple[Labelled, Labelled], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against distances instead of cosines, votes of one weight, a penalty on the biases or of another scale, and chunks that
    change the result."""
    neighbors = pytest.importorskip("sklearn.neighbors", reason="needs the extra demo")
    linear_model = pytest.importorskip("sklearn.linear_model", reason="needs the extra demo")
    train, val = halves
    theirs = neighbors.KNeighborsClassifier(20, weights=lambda far: np.exp((1 - far) / 0.07), metric="cosine")
    theirs.fit(train.features.numpy(), train.labels.numpy())
    monkeypatch.setattr(probing, "_PRODUCTS", 1000)
    assert probing.neighbours_vote(train, val.features, CLASSES).tolist() == theirs.predict(val.features.numpy()).tolist()
    begin = None
    for c in (0.01, 1.0, 100.0):
        begin = probing.fit_logistic(train, CLASSES, c, begin)
        reference = linear_model.LogisticRegression(C=c, tol=1e-8, max_iter=5000).fit(
            train.features.numpy(), train.labels.numpy()
        )
        ours = (val.features @ begin[:-1] + begin[-1]).softmax(1).numpy()
        np.testing.assert_allclose(ours, reference.predict_proba(val.features.numpy()), atol=2e-5)
        assert probing.classify(begin, val.features).tolist() == reference.predict(val.features.numpy()).tolist()


def test_choices(halves: tuple[Labelled, Labelled]) -> None:
    """Guards against tries that are all alike, images of another class or twice, and a C that is not the best."""
    train, _ = halves
    tries = [probing.few_images(train, 3, attempt) for attempt in range(4)]
    for some in tries:
        assert torch.bincount(some.labels).tolist() == [3] * CLASSES and len(some.features.unique(dim=0)) == 3 * CLASSES
    assert len({tuple(some.features.flatten().tolist()) for some in tries}) == 4
    everything = probing.few_images(train, 10_000, 0)
    assert torch.equal(everything.labels.sort().values, train.labels.sort().values)
    assert probing.choose_c(train, CLASSES, (1e-9, 1.0, 1e-8)) == 1.0
    percent, c = probing.accuracies(train, train, CLASSES, [], 0.5)
    weights = probing.fit_logistic(train, CLASSES, 0.5)
    assert percent["linear"] == [100 * (probing.classify(weights, train.features) == train.labels).double().mean().item()]
    assert c == 0.5 and (probing.C_VALUES[0], probing.C_VALUES[-1], len(probing.C_VALUES)) == (1e-6, 1e5, 45)


def test_the_command(tmp_path: Path) -> None:
    """Guards against features of another layer, an image that is counted twice on two processes, and val's images among train's."""
    rng = np.random.default_rng(0)
    colours = rng.integers(0, 256, (3, 2, 2, 3))
    for split, count in (("train", 9), ("val", 5)):
        for number in range(3):
            (tmp_path / "images" / split / str(number)).mkdir(parents=True)
            for image in range(count):
                pixels = np.clip(colours[number] + rng.normal(0, 40, (2, 2, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).resize((40, 36)).save(tmp_path / "images" / split / str(number) / f"{image}.png")
    source = write_model(tmp_path / "model.safetensors", [*"abcdefghij"])
    result = tmp_path / "probe.json"
    words = ("--data", tmp_path / "images", "--few-shot", 2, "--c", 1, "--batch-size", 4, "--json", result)
    shown = run_forked("pipeline.probe", source, *words, processes=2).stdout
    row = json.loads(result.read_text())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    model, transform, _ = load(source)
    splits = []
    for split in ("train", "val"):
        files = sorted((tmp_path / "images" / split).rglob("*.png"))
        with torch.inference_mode():
            features = model.pooled(torch.stack([transform(Image.open(file)) for file in files])).double()
        splits.append(Labelled(features, torch.tensor([int(file.parent.name) for file in files])))
    train, val = splits
    assert (row["train_images"], row["val_images"], row["classes"], row["width"], row["c"]) == (27, 15, 3, 16, 1)
    expected, _ = probing.accuracies(train, val, 3, [2], 1)
    assert row["accuracy"] == {name: pytest.approx(tries) for name, tries in expected.items()}
    assert (
        f"{row['accuracy']['linear'][0]:.2f} %   C = 1\n" in shown and "2 a class" in shown and row["accuracy"]["k-NN"][0] > 40
    )
