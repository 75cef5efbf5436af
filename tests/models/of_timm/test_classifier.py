"""timm's models as ours: stochastic depth from given numbers, seeded generators, weights, layers, and a sentence for what does not fit."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.errors import UserError, install_extra
from pipeline.exporting.graph import trace
from pipeline.models import create_model, load_pretrained, model_entry, reference_state_dict
from pipeline.models.flops import count
from pipeline.models.registry import check_name
from pipeline.models.timm.names import defined_names
from pipeline.optim.averages import StepStatistics
from pipeline.step.train_step import sample_noise
from support.subjects import subject_of
from support.timm_models import SIZE, installed_timm

VIT, SHALLOW = "timm:vit_tiny_patch16_224", {"depth": 2}
CONVNET = "timm:resnet18"


@pytest.fixture(autouse=True)
def _timm(request: pytest.FixtureRequest) -> None:
    if "without_timm" not in request.node.name:
        installed_timm()


def built(name: str = VIT, drop_path: float = 0.0, **switches: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return create_model(name, 10, SIZE, drop_path, switches={**(SHALLOW if name == VIT else {}), **switches})


def pictures(count: int = 4) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [VIT, "timm:efficientnet_b0", "timm:convit_tiny"])
def test_stochastic_depth_is_timms_formula_with_given_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a branch that is scaled otherwise than timm does it, in another order, or not at all. ConViT calls one module
    for two branches. timm's own network gets the decisions of the same numbers instead of its draws."""
    import timm

    model = built(name, drop_path=0.5).train()
    theirs = timm.create_model(
        name.removeprefix("timm:"),
        num_classes=10,
        drop_path_rate=0.5,
        **({"img_size": SIZE} if name != "timm:efficientnet_b0" else {}),
        **(SHALLOW if name == VIT else {}),
    ).train()
    theirs.load_state_dict(model.net.state_dict())
    noise = torch.rand(4, model.noise_per_sample, generator=torch.Generator().manual_seed(2))
    kept = iter((noise >= model.drop_path_rates).T)  # (branches, B), in order of execution
    monkeypatch.setattr(Tensor, "bernoulli_", lambda self, p: self.copy_(next(kept).view(self.shape)))
    for either in (model, theirs):  # a dropout of its own would draw
        for module in either.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    expected = theirs(pictures())
    assert next(kept, None) is None
    assert torch.equal(model(pictures(), noise), expected)
    assert torch.equal(model.eval()(pictures()), theirs.eval()(pictures()))
    assert not torch.equal(model.train()(pictures(), torch.ones_like(noise) * 0.999), expected)


def test_recomputed_blocks_drop_the_same_branches() -> None:
    """Guards against activation checkpointing that draws anew in the backward pass, and BatchNorm that is updated there again."""
    noise = torch.rand(4, 64, generator=torch.Generator().manual_seed(2))
    for name, switches in ((VIT, {"proj_drop_rate": 0.2}), ("timm:efficientnet_b0", {})):
        results = []
        for checkpointing in (False, True):
            torch.manual_seed(0)
            options = {**SHALLOW, **switches} if name == VIT else switches
            model = create_model(name, 10, SIZE, 0.3, activation_checkpointing=checkpointing, switches=options).train()
            statistics = StepStatistics(model, SimpleNamespace(size=1, sum=lambda values: values))
            statistics.begin()
            for number in range(2):
                statistics.micro_batch(number)
                model.generator_seed = number
                model(pictures() + number, noise[:, : model.noise_per_sample]).square().sum().backward()
            statistics.end(taken=True)
            results.append({**dict(model.named_buffers()), **{key: p.grad for key, p in model.named_parameters()}})
        assert results[0].keys() == results[1].keys()
        for key, value in results[0].items():
            torch.testing.assert_close(results[1][key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {key}")


def test_other_randomness_is_seeded_and_leaves_no_trace() -> None:
    """Guards against dropout that differs after a restart or between equal places, is the same everywhere, or moves the generator
    that other code draws from."""
    model = built(drop_path=0.1, patch_drop_rate=0.5, attn_drop_rate=0.1).train()
    assert model.draws_from_generator and {"bernoulli", "randn"} & set(model.trial.draws)
    assert any("seeded for each micro-batch" in sentence for sentence in model.remarks((0.5,) * 3, (0.5,) * 3))
    assert not built(drop_path=0.1).draws_from_generator

    def scores(position: int, seed: int = 7) -> Tensor:
        place = np.arange(position, position + 4)
        request = SimpleNamespace(epoch=np.zeros(4, dtype=np.int64), position=place)
        noise = sample_noise(model, SimpleNamespace(request=request, images=pictures()), seed)
        return model(pictures(), torch.ones_like(noise) * 0.99)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = scores(100)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(scores(100), first)
    assert not torch.equal(scores(104), first) and not torch.equal(scores(100, seed=8), first)


def test_layers_and_weight_decay_are_timms() -> None:
    """Guards against groups of parameters that differ from those of timm's optimizers."""
    from timm.optim import param_groups_layer_decay

    for name in (VIT, CONVNET, "timm:swin_tiny_patch4_window7_224"):
        model = built(name)
        groups = param_groups_layer_decay(
            model.net, 0.05, model.net.no_weight_decay() if name != CONVNET else (), layer_decay=0.5
        )
        named = {id(p): key for key, p in model.named_parameters()}
        theirs = {named[id(p)]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
        exempt = model.no_weight_decay()
        ours = {
            key: (0.5 ** (model.num_layers - 1 - model.layer_of(key)), 0.05 if p.ndim > 1 and key not in exempt else 0.0)
            for key, p in model.named_parameters()
        }
        assert ours == theirs


def test_weights_come_in_timms_names_and_at_other_sizes(tmp_path: Path) -> None:
    """Guards against pretrained weights that need to be converted first, and a head of other classes that is kept."""
    import timm

    source = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=2 * SIZE, depth=2)
    model = built()
    said = load_pretrained(model, source.state_dict(), "w.pth")
    assert any("net.head.weight is initialized from scratch: (7, 192) there" in sentence for sentence in said)
    assert torch.equal(model.net.blocks[1].attn.qkv.weight, source.blocks[1].attn.qkv.weight)
    assert model.net.pos_embed.shape == (1, 17, 192) and source.pos_embed.shape == (1, 65, 192)
    assert reference_state_dict(model).keys() == model.net.state_dict().keys()
    again = built()
    load_pretrained(again, model.state_dict(), "ours")
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items() if "head" not in key)


def test_weights_of_deit3s_authors_fit() -> None:
    """Guards against LayerScale under the authors' names, which timm renames for DeiT-III alone."""
    name, switches = "timm:deit3_small_patch16_224", {"depth": 1, "embed_dim": 64, "num_heads": 1}
    source, model = built(name, **switches), built(name, **switches)
    with torch.no_grad():
        source.net.blocks[0].ls1.gamma.fill_(0.25)
    weights = {
        key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): value
        for key, value in source.net.state_dict().items()
    }
    load_pretrained(model, weights, "deit_3_small_224_1k.pth")
    assert torch.equal(model.net.blocks[0].ls1.gamma, torch.full((64,), 0.25))
    del weights["blocks.0.gamma_1"]
    with pytest.raises(UserError, match="deit_3.pth does not fit TimmClassifier .*: 1 missing"):
        load_pretrained(model, weights, "deit_3.pth")


def test_compiled_blocks_take_the_streams_numbers() -> None:
    """Guards against factors of the first step that a compiled graph keeps, and a compilation for each step."""
    model = built(drop_path=0.5).train()
    noises = [torch.rand(4, model.noise_per_sample, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2, 3)]
    expected = [model(pictures(), noise) for noise in noises]
    torch.compiler.reset()
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    for block in model.net.blocks:
        block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
    for number, noise in enumerate(noises):
        torch.testing.assert_close(model(pictures(), noise), expected[number])
        assert len(graphs) <= 2, "a graph for each block"
    torch.compiler.reset()


def test_features_are_what_the_classifier_sees() -> None:
    """Guards against features of another layer than the one before the classifier."""
    for name, head in ((VIT, "head"), (CONVNET, "fc")):
        model = built(name).eval()
        features = model.pooled(pictures())
        assert features.shape == (4, model.pooled_width)
        torch.testing.assert_close(model.net.get_submodule(head)(features), model(pictures()))


def test_an_exported_graph_takes_any_batch() -> None:
    """Guards against a batch size that tracing fixes."""
    for name in (VIT, CONVNET):
        model = built(name)
        program = trace(subject_of(model, name, SIZE, 10)).module()
        for batch in (1, 5):
            torch.testing.assert_close(program(pictures(batch)), model(pictures(batch)), rtol=1e-4, atol=1e-4)


def test_both_counts_of_flops_agree_where_nothing_is_left_out() -> None:
    """Guards against products that one counter misses: fvcore adds normalizations, 1 to 5 % here."""
    for name in (VIT, CONVNET):
        row = count(name, SIZE, 10)
        assert row.uncounted == [] and 1 <= row.gmacs / row.gmacs_torch < 1.05
        assert "torch.utils.flop_counter" in row.remarks()[0]


def test_names_are_known_without_pytorch() -> None:
    """Guards against a release of timm that registers its models in another way."""
    import timm

    assert defined_names() >= set(timm.list_models(module="resnet")) and len(defined_names()) > 1000
    assert model_entry("timm:maxvit_nano_rw_256").image_size == 256


def test_a_wrong_name_is_one_sentence() -> None:
    """Guards against a download, a path, or a traceback."""
    for name, sentence in (
        (
            "timm:vit_tiny_patch16_22",
            r"must be a model of timm's list, got timm:vit_tiny_patch16_22: did you mean timm:vit_tiny_patch16_224\?",
        ),
        (
            "timm:vit_tiny_patch16_224.augreg_in21k",
            "names weights: write model.name=timm:vit_tiny_patch16_224 train.init_from=timm:vit_tiny_patch16_224.augreg_in21k.",
        ),
        ("timm:hf-hub:timm/resnet18", "must be a name of timm's list, got timm:hf-hub:timm/resnet18, a folder or a repository"),
        ("timm:", "must be a model of timm's list, got timm:"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_name(name)


def test_without_timm_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an ImportError. This one runs without timm too."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "timm" else find(name))
    with pytest.raises(UserError, match=re.escape(f"requires timm, which is not installed: {install_extra('timm')}")):
        check_name("timm:resnet18")


@pytest.mark.parametrize(
    ("name", "size", "drop_path", "switches", "sentence"),
    [
        (VIT, 64, 0.0, {"dept": 2}, "unknown switch 'dept', which timm:vit_tiny_patch16_224 does not take: did you mean 'depth'"),
        (VIT, 64, 0.0, {"img_size": 64}, "model.switches.img_size is set for .*, but model.image_size sets it"),
        (VIT, 64, 0.0, {"pretrained": True}, "train.init_from=timm:NAME.TAG takes timm's weights"),
        (VIT, 64, 0.0, {"checkpoint_path": "w.pth"}, "train.init_from takes a file"),
        (VIT, 64, 0.0, {"embed_dim": 191}, "cannot be built .*191"),
        ("timm:vgg11", 64, 0.1, {}, "model.drop_path is above 0, but timm:vgg11 takes no drop_path_rate"),
        (VIT, 64, 0.0, {"global_pool": ""}, r"is not a plain classifier: in training it must give \(2, 10\) for 2 images, got \(2, 17, 10\)"),
        ("timm:hiera_tiny_224", 60, 0.0, {}, "timm:hiera_tiny_224 (cannot be built|takes no images)"),
        (CONVNET, 64, 0.0, {"global_pool": ""}, "timm:resnet18 takes no images of 64 x 64 pixels with the switches .*: choose another"),
    ],
)  # fmt: skip
def test_what_timm_cannot_build_is_one_sentence(
    name: str, size: int, drop_path: float, switches: dict[str, object], sentence: str
) -> None:
    """Guards against timm's tracebacks, and arguments that would download or contradict the config."""
    with pytest.raises(UserError, match=sentence):
        create_model(name, 10, size, drop_path, switches=switches)


def test_a_model_without_activation_checkpointing_is_one_sentence() -> None:
    """Guards against timm's assertion."""
    with pytest.raises(UserError, match="train.activation_checkpointing is true, but timm:vgg11 has none in timm"):
        create_model("timm:vgg11", 10, SIZE, activation_checkpointing=True)


def test_an_analysis_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Guards against an empty page."""
    from pipeline.analysis.session import Options, analyze, read_subject

    with pytest.raises(UserError, match="requires a model of this project's families, got timm:resnet18"):
        analyze([read_subject(CONVNET)], Options(output=tmp_path))
