"""LAMB, Muon and layer-wise learning rates: beside other implementations, under every ZeRO stage, and from checkpoint to checkpoint."""

from __future__ import annotations

import functools
import math
import re
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optim.optimizers_program import HALF, LR, OPTIMIZERS, STAGES, small_config, small_model
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.parts import WEIGHT, SliceReader, optimizer_quantity, read_headers
from pipeline.config import OptimConfig
from pipeline.errors import UserError
from pipeline.models import create_model, list_models, reference_state_dict
from pipeline.models.common.base import Switches, VisionModel
from pipeline.optim.build import build_optimizer, describe, optimizer_description, parameter_groups
from pipeline.optim.description import MATRICES
from support.ranks import run_forked

STEPS = 20
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
ALL = [(processes, stage) for processes, stages in STAGES.items() for stage in stages]
LIMIT = 1e-4  # relative distance from one process, of the weights or a moment, after six steps; found: 8.2e-6 at most


@functools.cache
def _runs() -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="optimizers-")
    for processes in STAGES:
        run_forked("optim.optimizers_program", folder.name, processes=processes)
    return folder


def saved(run: str, step: int = 2 * HALF) -> dict[tuple[str, str], Tensor]:
    """(quantity, parameter) -> all weights and moments of a checkpoint, flattened."""
    folder = step_folder(Path(_runs().name) / run, step)
    manifest = CheckpointManifest.read(folder)
    reader = SliceReader(folder, read_headers(folder, manifest.files))
    return {
        (quantity, name): reader.read(quantity, name, 0, math.prod(manifest.shapes[name]))
        for quantity in {WEIGHT, *map(optimizer_quantity, MOMENTS)} & reader.quantities
        for name in reader.slices(quantity)
    }


def distance(a: dict[tuple[str, str], Tensor], b: dict[tuple[str, str], Tensor]) -> float:
    """The largest of |a - b| / |b| over weights and each moment."""
    assert a.keys() == b.keys()
    found = []
    for quantity in {quantity for quantity, _ in b}:
        keys = [key for key in b if key[0] == quantity]
        ours, theirs = (torch.cat([each[key].double() for key in keys]) for each in (a, b))
        found.append(((ours - theirs).norm() / theirs.norm()).item())
    return max(found)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_stage_steps_like_one_process(name: str) -> None:
    """Guards against a trust ratio or an orthogonalization of the slice that a rank holds instead of the whole parameter."""
    alone = saved(f"{name}-1-0")
    description = optimizer_description(small_config(name, 0, 1).optim)
    kept = {tensor for matrices in (False, True) for tensor in description.state({MATRICES: matrices}).tensors}
    assert {quantity for quantity, _ in alone} == {WEIGHT, *map(optimizer_quantity, kept)} and kept <= {*MOMENTS}
    for processes, stage in ALL:
        found = distance(saved(f"{name}-{processes}-{stage}"), alone)
        assert found < LIMIT, (processes, stage)
    assert distance(saved(f"{name}-1-0", HALF), alone) > 0.5  # three steps are more than that


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_is_resumed_at_any_world_size_and_stage(name: str) -> None:
    """Guards against moments that are lost, or come back in another place, where the slices are others."""
    straight = saved(f"{name}-2-1")
    for processes, stage in ALL:
        found = distance(saved(f"{name}-{processes}-{stage}-resumed"), straight)
        assert found < LIMIT, (processes, stage)


def stepped(optimizers: list[torch.optim.Optimizer], model: nn.Module, clip: float = math.inf) -> list[Tensor]:
    """The parameters after some steps with given gradients, at rates that change."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 - step / STEPS)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative distance of two parameters."""
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(ours, theirs, strict=True))


def in_groups(model: VisionModel, *kinds: tuple[list[str], float]) -> list[dict]:
    """Parameter groups from (names, weight decay)."""
    parameters = dict(model.named_parameters())
    return [{"params": [parameters[name] for name in names], "weight_decay": decay} for names, decay in kinds]


def names_of(model: VisionModel) -> tuple[list[str], list[str], list[str]]:
    """Names of DeiT's matrices of the blocks, of what else decays, and of the rest, by a list of its own."""
    names = list(dict(model.named_parameters()))
    matrices = [name for name in names if re.fullmatch(r"blocks\.\d\.(attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.weight", name)]
    others = ["patch_embedding.weight", "head.weight"]
    return matrices, others, [name for name in names if name not in {*matrices, *others}]


def test_lamb_is_timms(record_property) -> None:
    """Guards against another LAMB than the one that DeiT III was trained with; timm's is that of apex without a GPU."""
    optim = pytest.importorskip("timm.optim", reason="timm is not installed")
    ours, theirs = small_model(), small_model()
    matrices, others, plain = names_of(theirs)
    groups = in_groups(theirs, (matrices + others, 0.1), (plain, 0.0))
    lamb = build_optimizer(ours, OptimConfig(name="lamb", weight_decay=0.1))
    found = furthest(stepped([lamb], ours, clip=1.0), stepped([optim.Lamb(groups, lr=LR, eps=1e-8, max_grad_norm=1.0)], theirs))
    record_property("largest distance", found)
    assert found < 1e-5


def test_muon_is_pytorchs(record_property) -> None:
    """Guards against another step than ``torch.optim.Muon``'s for the matrices of the blocks, and than AdamW's for all else."""
    ours, theirs = small_model(), small_model()
    matrices, others, plain = names_of(theirs)
    muon = torch.optim.Muon(in_groups(theirs, (matrices, 0.1)), adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(in_groups(theirs, (others, 0.1), (plain, 0.0)), fused=True)
    optimizer = build_optimizer(ours, OptimConfig(name="muon", weight_decay=0.1), "bf16")
    found = furthest(stepped([optimizer], ours), stepped([muon, adamw], theirs))
    record_property("largest distance", found)
    assert found < 1e-5


def test_sgd_is_its_definition(record_property) -> None:
    """Guards against another SGD than timm's ``sgd``: Nesterov's momentum without dampening, weight decay in the gradient, per group."""
    ours, theirs = small_model(), small_model()
    matrices, others, _ = names_of(theirs)
    decays = {name: 1e-2 * (name in {*matrices, *others}) for name, _ in theirs.named_parameters()}
    found = stepped([build_optimizer(ours, OptimConfig(name="sgd", momentum=0.9, weight_decay=1e-2))], ours)
    generator, velocity = torch.Generator().manual_seed(1), {name: 0.0 for name in decays}
    expected = {name: parameter.detach().double() for name, parameter in theirs.named_parameters()}
    for step in range(STEPS):
        for name, parameter in theirs.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator).double() + decays[name] * expected[name]
            velocity[name] = 0.9 * velocity[name] + gradient
            expected[name] = expected[name] - LR * (1 - step / STEPS) * (gradient + 0.9 * velocity[name])
    distance = furthest([each.double() for each in found], list(expected.values()))
    record_property("largest distance", distance)
    assert distance < 1e-5


@pytest.mark.parametrize(
    ("name", "timms"), [("deit_t", "deit_tiny_patch16_224"), ("convit_ti", "convit_tiny"), ("gmlp_s", "gmlp_s16_224")]
)
def test_layer_groups_are_timms(name: str, timms: str) -> None:
    """Guards against other layers, rates or decayed parameters than those of ``timm.optim.param_groups_layer_decay``."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    from timm.optim import param_groups_layer_decay

    their_model = timm.create_model(timms)
    exempt = getattr(their_model, "no_weight_decay", set)()
    groups = param_groups_layer_decay(their_model, 0.05, exempt, layer_decay=0.65)
    their_names = {parameter: name for name, parameter in their_model.named_parameters()}
    theirs = [({their_names[p] for p in group["params"]}, group["lr_scale"], group["weight_decay"]) for group in groups]

    model = create_model(name)
    numbered = {n: torch.full_like(p, i) for i, (n, p) in enumerate(model.named_parameters())}  # to follow the authors' names
    numbers = {id(p): float(i) for i, p in enumerate(model.parameters())}
    model.load_state_dict(numbered, strict=False)
    names = {
        float(value.flatten()[0]): key for key, value in reference_state_dict(model).items() if key in their_names.values()
    }
    ours = [
        ({names[numbers[id(p)]] for p in group["params"]}, group["lr_scale"], group["weight_decay"])
        for group in parameter_groups(model, OptimConfig(layer_decay=0.65, weight_decay=0.05))
    ]
    by_names = {tuple(sorted(names)): values for names, *values in theirs}
    assert {tuple(sorted(names)): values for names, *values in ours} == by_names
    assert len(ours) == len(theirs) == 2 * model.num_layers


def test_layer_decay_leaves_the_head_alone_and_slows_the_stem_most() -> None:
    """Guards against an exponent that is off by one, also where timm is not installed: layer l of L takes decay^(L - 1 - l)."""
    with torch.device("meta"):
        model = create_model("deit_t")
    groups = parameter_groups(model, OptimConfig(layer_decay=0.5))
    rates = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert rates["head.weight"] == 1 and rates["norm.weight"] == 0.5 and min(rates.values()) == 0.5 ** (model.num_layers - 1)
    assert rates["blocks.0.norm1.weight"] == 0.5 ** (model.num_layers - 2)


@pytest.mark.parametrize("name", list_models())
def test_every_family_has_its_layers(name: str) -> None:
    """Guards against a block or a downsampling that learns at the rate of the stem, and against layers without parameters."""
    with torch.device("meta"):
        model = create_model(name, image_size=32 if name.endswith("_32") else 224)
    layers = {parameter: model.layer_of(parameter) for parameter, _ in model.named_parameters()}
    last = model.num_layers - 1
    assert sorted(set(layers.values())) == list(range(last + 1))
    assert {n for n, layer in layers.items() if layer == last} == {"head.weight", "head.bias"}
    assert all(
        "blocks." not in n and not n.startswith(("norm.", "downsamplings.", "stages.", "levels."))
        for n in layers
        if not layers[n]
    )
    assert layers["norm.weight"] == last - 1
    in_blocks = [layer for n, layer in layers.items() if ".blocks." in f".{n}"]
    assert sorted(set(in_blocks)) == list(range(1, last)) and in_blocks == sorted(in_blocks)


def test_a_stage_begins_with_what_leads_to_it() -> None:
    """Guards against downsampling, and what follows a block, in another layer than timm gives them (Swin's: the next block's)."""
    with torch.device("meta"):
        lsat = create_model("lsat_t_32", image_size=32, switches={"local": "cvt"})
        deit = create_model("deit_t", switches={"conditional_position": 5})
        posmlp = create_model("posmlp_t")
    assert lsat.layer_of("downsamplings.0.conv.weight") == lsat.layer_of("levels.1.blocks.0.mlp.fc1.weight") == 3
    assert lsat.layer_of("levels.1.position.table") == 3 and lsat.layer_of("projection.query.weight") == 1
    assert deit.layer_of("position_generators.4.weight") == deit.layer_of("blocks.4.norm1.weight") == 5
    assert posmlp.layer_of("stages.2.merging.conv.weight") == posmlp.layer_of("stages.2.blocks.0.fc1.weight") == 5


class OneLayer(VisionModel):
    """A classifier without blocks, all of one layer."""

    num_layers = 1

    def __init__(self) -> None:
        super().__init__([0.0], False, Switches())
        self.head = nn.Linear(3, 2)

    def layer_of(self, name: str) -> int:
        return 0


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"name": "muon"},
            "optim.name=muon requires a model with weight matrices before its classifier, got OneLayer, which has none: set optim.name=adamw.",
        ),
        (
            {"layer_decay": 0.7},
            "optim.layer_decay requires a model of two layers or more, got 0.7 for OneLayer, whose parameters are all of one layer: "
            "set optim.layer_decay=null.",
        ),
    ],
)
def test_a_model_that_an_optimizer_does_not_suit_is_refused(keys: dict, sentence: str) -> None:
    """Guards against a key that has no effect, in silence."""
    with pytest.raises(UserError) as error:
        parameter_groups(OneLayer(), OptimConfig(**keys))
    assert str(error.value) == sentence


def test_the_log_names_the_optimizer() -> None:
    """Guards against a log that does not tell what updates which weights."""
    with torch.device("meta"):
        model = create_model("deit_t")
    assert describe(model, OptimConfig()) == "AdamW"
    assert (
        describe(model, OptimConfig(name="lamb", layer_decay=0.75))
        == "LAMB, learning rate times 0.75 per layer below the last of 14"
    )
    assert describe(model, OptimConfig(name="muon")) == "Muon for 48 matrices (93% of the parameters) and AdamW for the rest"
