"""A classifier's weights go into its feature form under the same names, strictly but for the head."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pipeline.errors import UserError
from pipeline.models import (
    as_features,
    create_model,
    load_pretrained,
    load_reference_state_dict,
    reference_state_dict,
)
from pipeline.models.common.base import VisionModel
from pipeline.models.weights.exported import Description, write_exported
from support.launching import REPOSITORY

SIZES = {"pervit_t": 32, "deit_t": 32, "lsat_s_224": 32}


def classifier(name: str) -> VisionModel:
    torch.manual_seed(0)
    return create_model(name, num_classes=3, image_size=SIZES[name]).eval()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("whose", ["ours", "authors"])
def test_weights_of_a_classifier(name: str, whose: str) -> None:
    """Guards against a backbone that starts from fresh weights, in whole or in part, and one that refuses trained ones."""
    trained = classifier(name)
    weights = trained.state_dict() if whose == "ours" else reference_state_dict(trained)
    images = torch.randn(1, 3, 32, 64)
    model = create_model(name, image_size=32, features=True).eval()
    said = load_pretrained(model, weights, "weights.pth")
    assert "the head is left out: the model gives features" in said
    with torch.inference_mode():
        found, expected = model(images), as_features(trained)(images)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    if whose == "authors":
        again = load_reference_state_dict(create_model(name, image_size=32, features=True).eval(), weights)
        with torch.inference_mode():
            assert torch.equal(again(images)[-1], expected[-1])


def test_the_rest_is_strict() -> None:
    """Guards against weights of another model, or half of them, that load because a head may be missing."""
    model = create_model("lsat_s_224", image_size=32, features=True)
    weights = classifier("lsat_s_224").state_dict()
    del weights["levels.1.norm1.weight"]
    with pytest.raises(UserError, match=r"1 missing \(levels.1.norm1.weight\), 0 unknown"):
        load_pretrained(model, weights, "w.pth")
    own = model.state_dict()
    assert "output_norms.1.weight" in own
    load_pretrained(model, own, "w.pth")  # its own, of a detector's checkpoint
    with pytest.raises(UserError, match=r"1 missing \(output_norms.1.weight\)"):
        load_pretrained(model, {name: value for name, value in own.items() if name != "output_norms.1.weight"}, "w.pth")
    with pytest.raises(UserError, match=r"2 missing \(head.bias, head.weight\), 4 unknown \(output_norms.0.bias"):
        load_pretrained(classifier("lsat_s_224"), own, "w.pth")
    with pytest.raises(UserError, match="this LSAT is in its feature form, which has no head"):
        reference_state_dict(model)


def test_position_embeddings_of_another_size() -> None:
    """Guards against a backbone that cannot be built at another image size than that of its weights."""
    model = create_model("deit_t", image_size=64, features=True)
    said = load_pretrained(model, classifier("deit_t").state_dict(), "w.pth")
    assert any(sentence.startswith("position_embedding.weight is resampled") for sentence in said)


def test_the_documentations_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an example that nobody has run."""
    text = (REPOSITORY / "docs" / "inference.md").read_text()
    block = next(part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "as_features" in part)
    model = classifier("pervit_t")
    description = Description(
        model="pervit_t",
        num_classes=3,
        image_size=32,
        switches={},
        classes=["a", "b", "c"],
        mean=[0.5] * 3,
        std=[0.5] * 3,
        eval_crop=0.875,
        precision="fp32",
        step=1,
        weights="model",
        names="ours",
    )
    write_exported(tmp_path / "pervit_t.safetensors", model.state_dict(), description)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(block, names)
    assert [tuple(x.shape) for x in names["maps"]] == [(1, 96, 24, 40), (1, 192, 12, 20), (1, 384, 6, 10), (1, 768, 3, 5)]
    assert names["trained"].strides == (16,) and torch.equal(names["trained"].norm.weight, model.norm.weight)
