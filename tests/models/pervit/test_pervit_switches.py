"""PerViT's ablations change what their tables say, and nothing else."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.analysis.chapter import Request
from pipeline.analysis.session import check_query
from pipeline.errors import UserError
from pipeline.logs.pictures import peripheral_maps
from pipeline.models import as_features, create_model, flops
from pipeline.models.common.probe import recorded
from pipeline.models.pervit.model import PeripheralAttention, PerViT, PerViTLayout, PerViTSwitches, StaticAttention
from pipeline.models.pervit.position import (
    NORM_BIAS,
    DistanceScales,
    LearnedVectors,
    PeripheralPosition,
    PhiDesign,
    position_distances,
)
from support.two_steps import two_steps

SMALL = PerViTLayout(heads=2, widths=(8, 12, 16, 20), stem_widths=(4, 4, 6, 8), depths=(1, 1, 2, 1), mlp_ratio=2)
PIXELS = 64  # 4 x 4 tokens

# Switches; names that go, come and change their shape against the published model.
PROJECTIONS = {"blocks.position.projection1.weight", "blocks.position.projection2.weight"}
LAYER1 = {f"blocks.position.{name}" for name in ("projection1.weight", "projection1.bias", "norm1.weight", "norm1.bias")}
LAYER2 = {f"blocks.position.{name}" for name in ("projection2.weight", "projection2.bias", "norm2.weight", "norm2.bias")}
PHI = {"distance_scales.weight", "distance_scales.bias"} | LAYER1 | LAYER2
STEM = {f"stem.layers.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")} | {
    "stem.projection.weight",
    "stem.projection.bias",
}
ABLATIONS = [
    ({"phi_p": False}, PHI, set(), set()),
    ({"phi_c": False}, {"blocks.attn.qkv.weight"}, {"blocks.attn.v.weight"}, set()),
    ({"conv_stem": False}, STEM, {"stem.weight", "stem.bias"}, set()),
    ({"cpe": False}, {"blocks.cpe.weight", "blocks.cpe.bias"}, set(), set()),
    ({"position_embedding": True}, set(), {"position_embedding.weight"}, set()),
    ({"phi_p_distance": "learned"}, set(), {"position_vectors.weight"}, set()),
    ({"phi_p_neighbours": False}, set(), set(), PROJECTIONS),
    ({"phi_p_layers": 1}, LAYER2, set(), LAYER1),
    ({"phi_p_layers": 1, "phi_p_neighbours": False}, LAYER2, set(), LAYER1),
    ({"phi_p_distance": "learned", "phi_p_neighbours": False}, set(), {"position_vectors.weight"}, PROJECTIONS),
    ({"phi_p_init": "conv"}, set(), set(), set()),
    ({"phi_p_init": "random"}, set(), set(), set()),
    ({"phi_p_frozen": True}, set(), set(), set()),
    ({"phi_p": False, "conv_stem": False, "cpe": False}, PHI | STEM | {"blocks.cpe.weight", "blocks.cpe.bias"}, {"stem.weight", "stem.bias"}, set()),
]  # fmt: skip


def small_model(**switches) -> PerViT:
    torch.manual_seed(0)
    return PerViT(SMALL, num_classes=5, image_size=PIXELS, drop_path=0.1, switches=PerViTSwitches(**switches))


def shapes(model: nn.Module) -> dict[str, list[torch.Size]]:
    """Parameter name without block and layer numbers -> the shapes it has."""
    found: dict[str, list[torch.Size]] = {}
    for name, parameter in model.named_parameters():
        name = re.sub(r"^(blocks|stem\.layers)\.\d+", r"\1", name)
        found.setdefault(name, []).append(parameter.shape)
    return found


@pytest.mark.parametrize(("switches", "gone", "new", "reshaped"), ABLATIONS, ids=[str(row[0]) for row in ABLATIONS])
def test_a_switch_changes_the_parameters_it_should(switches: dict, gone: set, new: set, reshaped: set) -> None:
    """Guards against an ablation that leaves its part in place, or takes another part with it."""
    with torch.device("meta"):
        published, ablated = shapes(small_model()), shapes(small_model(**switches))
    assert published.keys() - ablated.keys() == gone
    assert ablated.keys() - published.keys() == new
    assert {name for name in published.keys() & ablated.keys() if published[name] != ablated[name]} == reshaped


@pytest.mark.parametrize("switches", [row[0] for row in ABLATIONS], ids=str)
def test_a_switch_trains(switches: dict) -> None:
    """Guards against an ablation that diverges, moves what is frozen, leaves a parameter without gradient or fails in bf16."""
    model = small_model(**switches)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    phi = {
        name for name, _ in model.named_parameters() if re.match(r"distance_scales|position_vectors|blocks.\d+.position", name)
    }
    assert frozen == (phi if switches.get("phi_p_frozen") else set())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    two_steps(model, optimizer, [torch.randn(4, 3, PIXELS, PIXELS)] * 2, labels=[0, 1, 2, 3])
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    # An instance norm removes what these add, so their gradient is rounding or nothing.
    inert = {name for name in phi if re.search(r"distance_scales.bias|projection\d.bias", name)}
    assert still - inert == frozen - inert
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(torch.randn(2, 3, PIXELS, PIXELS))).all()
    model.eval()
    images = torch.randn(2, 3, PIXELS, PIXELS)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("distance", ["euclidean", "learned"])
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_phi_is_the_papers_formula_in_every_design(distance: str, neighbours: bool, layers: int) -> None:
    """Guards against a design of Table 5 that is not Eq. 8 with fewer layers, 1x1 kernels or other distances."""
    torch.manual_seed(0)
    heads, grid = 2, (3, 5)
    design = PhiDesign(distance, neighbours, layers, init="random")
    position, scales = PeripheralPosition(heads, 0, 12, design).double(), DistanceScales(4 * heads, "random").double()
    if distance == "learned":
        distances = LearnedVectors(4 * heads, grid, design.border).double()(grid)
    else:
        distances = position_distances(*grid, torch.device("cpu"), torch.float64, design.border)
    scale, offset = scales()

    r = scale[:, None, None] * distances + offset[:, None, None]  # (N, 4 * heads, H', W'): R itself
    for layer in range(1, layers + 1):
        projection, norm = getattr(position, f"projection{layer}"), getattr(position, f"norm{layer}")
        r = F.conv2d(r.relu() if layer == 2 else r, projection.weight, projection.bias)
        r = (r - r.mean((2, 3), keepdim=True)) / (r.var((2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()
        r = r * norm.weight[:, None, None] + norm.bias[:, None, None]
    expected = r.sigmoid().flatten(2).transpose(0, 1)  # (heads, N, N)
    torch.testing.assert_close(position(distances, scale, offset).exp(), expected, rtol=1e-9, atol=1e-12)


def test_distances_reach_beyond_the_border_as_far_as_the_kernels_look() -> None:
    """Guards against a smaller border that moves the grid, and against learned distances from the wrong positions."""
    whole, one, none = (position_distances(3, 5, torch.device("cpu"), torch.float64, border) for border in (2, 1, 0))
    assert torch.equal(one, whole[:, :, 1:-1, 1:-1]) and torch.equal(none, whole[:, :, 2:-2, 2:-2])
    vectors = LearnedVectors(channels=4, grid=(3, 5), border=1)
    assert vectors.weight.min() < -0.8 and vectors.weight.max() > 0.8
    distances = vectors((3, 5))  # (15, 4, 5, 7)
    for query, (row, column) in {0: (0, 0), 7: (1, 2), 14: (2, 4)}.items():
        expected = (vectors.weight - vectors.weight[:, row + 1, column + 1, None, None]).abs()
        assert torch.equal(distances[query], expected)


def test_without_neighbours_phi_is_a_function_of_the_distance() -> None:
    """Guards against 1x1 projections that still see where a key lies (Sec. 3.1: Eq. 6 is rotationally symmetric)."""
    torch.manual_seed(0)
    distance = position_distances(4, 4, torch.device("cpu"), torch.float32, border=0)  # (16, 1, 4, 4)
    phi = {}
    for neighbours in (False, True):
        design = PhiDesign(neighbours=neighbours, init="random")
        padded = position_distances(4, 4, torch.device("cpu"), torch.float32, design.border)
        phi[neighbours] = PeripheralPosition(2, 0, 12, design)(padded, *DistanceScales(8)())  # (2, 16, 16)
    query = 5  # row 1, column 1
    left, above = 4, 1
    assert distance[query].flatten()[left] == distance[query].flatten()[above]
    torch.testing.assert_close(phi[False][:, query, left], phi[False][:, query, above])
    assert (phi[True][:, query, left] - phi[True][:, query, above]).abs().min() > 1e-3


def test_initializations_start_as_table_5_says() -> None:
    """Guards against an initialization that is the peripheral one under another name."""
    phi = {}
    for init in ("peripheral", "conv", "random"):
        with torch.no_grad():
            phi[init] = torch.stack(small_model(phi_p_init=init).log_phi((4, 4))).exp()  # (5, 2, 16, 16)
    means = phi["peripheral"].mean((1, 2, 3))
    assert (means.diff() > 0).all(), "from local to global"
    torch.testing.assert_close(phi["conv"], phi["peripheral"][:1].expand_as(phi["conv"]))
    random = small_model(phi_p_init="random")
    norms = torch.cat([p.flatten() for name, p in random.named_parameters() if re.search(r"position.norm\d", name)])
    assert norms.mean().abs() < 0.25 and 0.75 < norms.std() < 1.25
    assert random.distance_scales.weight.min() < -0.1 and random.distance_scales.weight.max() > 0.1
    assert not torch.equal(phi["random"][:, 0], phi["random"][:, 1]), "heads differ"
    assert phi["random"].std(dim=3).mean() > 0.05, "noise, not a constant"


def test_a_large_bias_makes_plain_self_attention() -> None:
    """Guards against Φp doing more than weighing (Supplement C: beta to infinity gives Φp = 1 and self-attention)."""
    peripheral, plain = small_model().double().eval(), small_model(phi_p=False).double().eval()
    for block in peripheral.blocks:
        nn.init.constant_(block.position.norm2.bias, 1e4)
    kept = {name: value for name, value in peripheral.state_dict().items() if name in plain.state_dict()}
    plain.load_state_dict(kept, strict=True)
    images = torch.randn(2, 3, PIXELS, PIXELS, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(peripheral(images), plain(images), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention_type", [PeripheralAttention, StaticAttention])
def test_one_hot_phi_makes_a_convolution(attention_type: type[nn.Module]) -> None:
    """Guards against Φp's query and key being swapped, or content leaking in (Supplement C, Eq. 28 to 39)."""
    torch.manual_seed(0)
    heads, width, side = 9, 18, 6
    attention = attention_type(width, heads).double()
    rows, columns = torch.arange(side * side) // side, torch.arange(side * side) % side
    log_phi = torch.full((heads, side * side, side * side), -1e4, dtype=torch.float64)  # exp(-1e4) = 0
    kernel = torch.zeros(width, width, 3, 3, dtype=torch.float64)
    values = list(attention.state_dict().values())[0][-width:]  # (width, width): the rows of V
    for head in range(heads):
        dy, dx = head // 3 - 1, head % 3 - 1  # head h looks at the key q + (dy, dx)
        hit = (rows[None] == rows[:, None] + dy) & (columns[None] == columns[:, None] + dx)  # (queries, keys)
        log_phi[head][hit] = 0.0
        of_head = slice(head * width // heads, (head + 1) * width // heads)
        kernel[:, :, dy + 1, dx + 1] = attention.proj.weight[:, of_head] @ values[of_head]
    x = torch.randn(2, side * side, width, dtype=torch.float64)
    image = x.transpose(1, 2).unflatten(2, (side, side))  # (B, width, side, side)
    with torch.no_grad():
        attended = attention(x, log_phi).transpose(1, 2).unflatten(2, (side, side))
    expected = F.conv2d(image, kernel, attention.proj.bias)  # without a border: there heads have no key
    torch.testing.assert_close(attended[:, :, 1:-1, 1:-1], expected.detach(), rtol=1e-10, atol=1e-10)


def test_probes_give_both_attentions_and_their_product() -> None:
    """Guards against recorded attention that is not the one that was applied."""
    model = small_model().double().eval()
    images = torch.randn(2, 3, PIXELS, PIXELS, dtype=torch.float64)
    with torch.no_grad(), recorded("phi_p", "phi_c", "attention") as values:
        logits = model(images)
        maps = model.log_phi((4, 4))
    assert [len(values[name]) for name in ("phi_p", "phi_c", "attention")] == [5, 5, 5]
    for phi_p, phi_c, attention, log_phi in zip(values["phi_p"], values["phi_c"], values["attention"], maps):
        assert phi_p.shape == (2, 16, 16) and phi_c.shape == attention.shape == (2, 2, 16, 16)
        torch.testing.assert_close(phi_p, log_phi.exp())
        torch.testing.assert_close(attention, F.normalize(phi_c * phi_p, p=1, dim=-1))
    with torch.no_grad():
        assert torch.equal(model(images), logits), "a pass that is recorded is the same pass"
    with torch.no_grad(), recorded("phi_p", "phi_c", "attention") as values:
        small_model(phi_c=False).eval()(images.float())
        small_model(phi_p=False).eval()(images.float())
    assert [len(values[name]) for name in ("phi_p", "phi_c", "attention")] == [5, 5, 10]


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"phi_p": False, "phi_c": False}, "must have phi_p or phi_c"),
        ({"phi_p": False, "phi_p_init": "conv"}, "phi_p_init = 'conv', but phi_p = false removes Φp"),
        (
            {"phi_p_init": "rand"},
            r"model.switches.phi_p_init must be 'peripheral', 'conv' or 'random', got 'rand'",
        ),
        ({"phi_p_layer": 1}, "unknown switch 'phi_p_layer': did you mean 'phi_p_layers'?"),
        ({"widths": [128, 190, 224, 280]}, "model.switches.widths has 190, .* multiple of the 4 heads: set it to 192"),
        ({"conv_stem": False, "stem_widths": [8, 8, 8]}, "has stem_widths, but conv_stem = false removes the convolutions"),
        ({"stem_widths": []}, r"model.switches.stem_widths must not be empty, got \[\]"),
        ({"stem_strides": [1, 2, 3, 2]}, r"model.switches.stem_strides"),
        ({"stem_strides": [1, 2, 2]}, "has 3 stem_strides for 4 convolutions"),
        ({"stem_widths": [8] * 4}, "has 4 stem_strides for 5 convolutions"),
    ],
)
def test_switches_that_make_no_model_are_refused(switches: dict, message: str) -> None:
    """Guards against a switch that is silently without effect."""
    with pytest.raises(UserError, match=message):
        create_model("pervit_t", switches=switches)


@pytest.mark.parametrize("switches", [{"phi_p_distance": "learned"}, {"position_embedding": True}])
def test_learned_positions_are_for_one_size(switches: dict) -> None:
    """Guards against positions that are broadcast over a grid they were not learned for."""
    with pytest.raises(UserError, match="model.image_size"):
        small_model(**switches)(torch.randn(1, 3, PIXELS, PIXELS + 32))


def test_widths_and_the_stem_follow_each_other() -> None:
    """Guards against a wider ablation whose stem keeps its old width (Table 1, footnote)."""
    model = create_model("pervit_t", num_classes=2, image_size=32, switches={"widths": [132, 192, 224, 280]})
    assert model.stem.projection.out_channels == 132 and model.blocks[0].norm1.normalized_shape == (132,)
    assert model.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


def test_strides_of_the_stem_make_the_patches() -> None:
    """Guards against small images on a grid of patches of 16 pixels, in the model, its figures or its feature maps."""
    switches = {"widths": [16] * 4, "stem_widths": [4, 8, 12], "stem_strides": [1, 2, 1, 2], "position_embedding": True}
    model = create_model("pervit_t", num_classes=2, image_size=32, switches=switches).eval()
    assert [layer[0].out_channels for layer in model.stem.layers] == [4, 8, 12, 16]
    assert model.patch == 4 and model.stem(torch.zeros(1, 3, 32, 32)).shape == (1, 16, 8, 8)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2) and model.position_embedding.grid == (8, 8)
    assert peripheral_maps(model, 32).shape == (12, 4, 8, 8)  # layers, heads, rows, columns
    check_query(Request(model, 32, (7, 7)))
    with pytest.raises(
        UserError, match="at 32 pixels there are 8 x 8 patches of 4 pixels: pass a row and a column from 0 to 7"
    ):
        check_query(Request(model, 32, (8, 0)))
    with pytest.raises(UserError, match="image_size must be a multiple of 4 and at least 8, got 30"):
        create_model("pervit_t", image_size=30, switches=switches)
    without = create_model("pervit_t", 2, 32, switches={**switches, "conv_stem": False, "stem_widths": None})
    assert without.stem.kernel_size == without.stem.stride == (4, 4) and without(torch.zeros(1, 3, 32, 32)).shape == (1, 2)
    features = as_features(create_model("pervit_t", 2, 24, switches={**switches, "position_embedding": False}))
    assert features.strides == (4,) and features(torch.zeros(1, 3, 24, 32))[0].shape == (1, 16, 6, 8)


def test_a_stem_of_another_depth() -> None:
    """Guards against a stem that has four convolutions whatever its widths say."""
    switches = {"widths": [16] * 4, "stem_widths": [4, 8, 8, 12, 12], "stem_strides": [1, 2, 1, 2, 1, 1]}
    model = create_model("pervit_t", num_classes=2, image_size=32, switches=switches).eval()
    assert [(layer[0].out_channels, layer[0].stride[0]) for layer in model.stem.layers] == [
        (4, 1),
        (8, 2),
        (8, 1),
        (12, 2),
        (12, 1),
        (16, 1),
    ]
    assert model.patch == 4 and model.stem(torch.zeros(1, 3, 32, 32)).shape == (1, 16, 8, 8)


def test_fewer_blocks_are_whole_stages() -> None:
    """Guards against depths that are read in another order than widths, and against an initialization spread over Table S5's layers."""
    switches = {"widths": [16, 24, 32, 40], "depths": [1, 2, 1, 1]}
    model = create_model("pervit_t", num_classes=2, image_size=32, switches=switches)
    assert [block.norm1.normalized_shape for block in model.blocks] == [(16,), (24,), (24,), (32,), (40,)]
    biases = [block.position.norm2.bias[0].item() for block in model.blocks]
    assert biases == pytest.approx(torch.linspace(*NORM_BIAS, 5).tolist())


def test_checkpointing_changes_no_gradient_of_an_ablated_model() -> None:
    """Guards against Φp's learned distances losing their gradient where blocks are recomputed."""
    images, noise = torch.randn(4, 3, PIXELS, PIXELS), torch.rand(4, 10)
    results = []
    for checkpointing in (False, True):
        model = small_model(phi_p_distance="learned", phi_c=False)
        model.activation_checkpointing = checkpointing
        model(images, noise).square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_ablations_are_counted() -> None:
    """Guards against an ablated model whose cost cannot be counted or is the published model's."""
    published = flops.count("pervit_t", 64)
    static = flops.count("pervit_t", 64, switches={"phi_c": False, "phi_p_distance": "learned"})
    plain = flops.count("pervit_t", 64, switches={"phi_p": False})
    assert static.gmacs < published.gmacs and static.gmacs_phi > published.gmacs_phi
    assert plain.params_phi == 0 and plain.gmacs_phi == 0 and plain.gmacs == published.gmacs
