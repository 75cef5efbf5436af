"""The feature form of every family: maps for images of any size, and nothing else than the classifier's own weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models import as_features, create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import resample_grid

LAYOUTS = {  # model: image_size, strides, widths
    "pervit_t": (64, (16,), (280,)),
    "convit_ti": (64, (16,), (192,)),
    "deit_t": (64, (16,), (192,)),
    "gmlp_s": (64, (16,), (256,)),
    "lsat_t_224": (56, (7, 14, 28, 56), (192,) * 4),
    "lsat_s_224": (32, (4, 8, 16), (64, 192, 384)),
    "posmlp_t": (64, (4, 8, 16, 32), (96, 192, 384, 768)),
}


def images_of(size: int, *shape: float) -> Tensor:
    """Two images; ``shape`` are multiples of ``size``."""
    return torch.randn(2, 3, *(int(size * side) for side in shape))


@pytest.mark.parametrize("name", LAYOUTS)
def test_maps_of_images_of_any_size(name: str) -> None:
    """Guards against strides or widths that are not those of the maps, and a position embedding or window that fixes the size."""
    size, strides, widths = LAYOUTS[name]
    model = create_model(name, image_size=size, features=True).eval()
    assert (model.strides, model.widths) == (strides, widths)
    assert not any(parameter.startswith("head") for parameter, _ in model.named_parameters())
    for shape in ((1, 1), (2, 1), (1, 3)) if name.startswith("lsat_t") else ((1, 1), (0.5, 1), (1.25, 2.75)):
        images = images_of(size, *shape)
        with torch.inference_mode():
            maps = model(images)
        expected = [(2, width, *(-(-side // stride) for side in images.shape[2:])) for stride, width in zip(strides, widths)]
        assert [tuple(x.shape) for x in maps] == expected
        assert all(x.isfinite().all() for x in maps)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_last_map_is_what_the_head_pools(name: str) -> None:
    """Guards against a trunk that is not the classifier's: a norm left out, padding or shifts at the size of the training."""
    torch.manual_seed(0)
    size, *_ = LAYOUTS[name]
    model = create_model(name, num_classes=3, image_size=size).eval()
    seen: dict[str, Tensor] = {}
    model.head.register_forward_pre_hook(lambda _, inputs: seen.update(pooled=inputs[0]))
    if hasattr(model, "class_token"):
        model.blocks[-1].register_forward_hook(lambda *arguments: seen.update(tokens=arguments[-1]))
    images = images_of(size, 1, 1)
    with torch.inference_mode():
        model(images)
        last = as_features(model)(images)[-1]
        if "tokens" in seen:  # the head takes the class token, which the map does not have
            expected = model.norm(seen["tokens"])
            torch.testing.assert_close(expected[:, 0], seen["pooled"], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(last.flatten(2).transpose(1, 2), expected[:, 1:], rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(last.mean((2, 3)), seen["pooled"], rtol=1e-4, atol=1e-5)


def gradients(model: VisionModel, images: Tensor, noise: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    sum((x * torch.randn_like(x)).sum() for x in model(images, noise)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_reach_every_parameter_and_checkpointing_changes_none(name: str) -> None:
    """Guards against parameters that no map depends on, which DistributedDataParallel refuses and ZeRO waits for, and against
    recomputation of padded windows with other masks or numbers."""
    size, *_ = LAYOUTS[name]
    images = images_of(size, 2, 1) if name.startswith("lsat_t") else images_of(size, 1.25, 1.5)
    torch.manual_seed(0)
    model = create_model(name, image_size=size, drop_path=0.1, features=True)
    noise = torch.rand(2, model.noise_per_sample).clamp(min=0.5)  # no branch is dropped
    found = gradients(model, images, noise)
    for parameter, gradient in found.items():
        assert gradient is not None, parameter
        assert gradient.any() or gradient.ndim == 1, parameter  # softmax and norms cancel some biases
    model.activation_checkpointing = True
    again = gradients(model, images, noise)
    assert all(torch.equal(found[parameter], again[parameter]) for parameter in found)


@pytest.mark.parametrize(
    ("name", "switches", "shape", "message"),
    [
        ("pervit_t", {}, (72, 64), "a side of an image must be a multiple of 16 and at least 32, got 72"),
        ("pervit_t", {"phi_p_distance": "learned"}, (64, 96), "4 x 6 tokens, but model.switches.phi_p_distance=learned"),
        ("deit_t", {}, (64, 40), "must be a multiple of 16 and at least 16, got 40"),
        ("deit_t", {"peripheral_position": True}, (16, 64), "1 x 4 patches, but Φp requires at least 2 x 2: pad or resize"),
        ("convit_ti", {}, (8, 64), "must be a multiple of 16 and at least 16, got 8"),
        ("gmlp_s", {}, (64, 72), "a side of an image must be a multiple of 16 and at least 16, got 72"),
        ("lsat_t_224", {}, (56, 57), "a side of an image must be a multiple of 7 and at least 56, got 57"),
        ("posmlp_t", {}, (62, 64), "a side of an image must be a multiple of 4 and at least 4, got 62"),
        (
            "posmlp_t",
            {"patch_merging": "linear"},
            (36, 64),
            "a side of an image must be a multiple of 32 and at least 32, got 36",
        ),
    ],
)
def test_sizes_that_cannot_work_are_one_sentence(name: str, switches: dict, shape: tuple[int, int], message: str) -> None:
    """Guards against a traceback from inside a view or a division by zero."""
    with torch.device("cpu" if "peripheral_position" in switches else "meta"):  # no autocast on meta, nor resampling
        model = create_model(name, image_size=LAYOUTS[name][0], switches=switches, features=True)
        with pytest.raises(UserError, match=message):
            model(torch.zeros(1, 3, *shape))


def test_position_embeddings_are_interpolated() -> None:
    """Guards against a resampling that transposes the grid, moves the class token's embedding or has no gradient."""
    table = torch.randn(1, 3 * 5, 7, dtype=torch.float64, requires_grad=True)
    assert resample_grid(table, (3, 5), (3, 5)) is table
    found = resample_grid(table, (3, 5), (8, 4))
    picture = table.unflatten(1, (3, 5)).permute(0, 3, 1, 2)
    expected = F.interpolate(picture, size=(8, 4), mode="bicubic", align_corners=False)
    torch.testing.assert_close(found, expected.flatten(2).transpose(1, 2))
    found.sum().backward()
    torch.testing.assert_close(table.grad.sum(), torch.tensor(8.0 * 4 * 7, dtype=torch.float64))

    model = create_model("deit_t", image_size=64, features=True)
    embedding = model.position_embedding
    x = torch.zeros(1, 1 + 2 * 6, 192)
    with torch.no_grad():
        moved = embedding(x, (2, 6))
        assert torch.equal(moved[:, 0], embedding.weight[:, 0])
        torch.testing.assert_close(moved[:, 1:], resample_grid(embedding.weight[:, 1:], (4, 4), (2, 6)))


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("posmlp_t", {"absolute_position": True}),
        ("posmlp_t", {"mixing": "lrpe_m"}),
        ("gmlp_s", {"mixing": "ggqpe"}),
        ("pervit_t", {"position_embedding": True, "phi_p": False}),
        ("lsat_s_224", {"shifts": "none"}),
    ],
)
def test_ablations_give_features_too(name: str, switches: dict) -> None:
    """Guards against a switch whose tables keep the size of the training."""
    size, strides, _ = LAYOUTS[name]
    model = create_model(name, image_size=size, switches=switches, features=True).eval()
    with torch.inference_mode():
        assert [len(x[0]) for x in model(images_of(size, 1.5, 1))] == [*model.widths]


@pytest.mark.parametrize("name", ["posmlp_t", "gmlp_s"])
def test_no_graph_break_in_a_padded_block(name: str) -> None:
    """Guards against blocks of a backbone that ``torch.compile`` cannot trace as a whole."""
    size, *_ = LAYOUTS[name]
    model = create_model(name, image_size=size, features=True).eval()
    images = images_of(size, 1.25, 1.5)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad():
        expected = model(images)
        for blocks in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            for block in blocks:
                if hasattr(block, "gate"):
                    block.forward = torch.compile(block.forward, backend="eager", fullgraph=True, dynamic=False)
        with torch._dynamo.config.patch(recompile_limit=64):
            found = model(images)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
