"""``train.compile`` in one process: what becomes a graph, what stays as it is, and what happens when compiling fails."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from pipeline.cluster.world import World
from pipeline.config import Config, TrainConfig
from pipeline.errors import UserError
from pipeline.models import create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import compile_tables_as_constants
from pipeline.models.common.probe import recorded
from pipeline.models.pervit.model import PerViT, PerViTLayout
from pipeline.optim.averages import StepStatistics
from pipeline.step.loss import Objective, label_loss
from pipeline.step.precision import autocast
from pipeline.training import compiling
from pipeline.training.building import choose_compilation
from pipeline.training.compiling import (
    INDUCTOR,
    TRITON,
    Compilation,
    cache_folder,
    drop_compile_cache,
    open_compile_cache,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = {"pervit_t": 32, "convit_ti": 32, "deit_t": 32, "lsat_t_224": 56, "posmlp_t": 32, "gmlp_s": 32}
# A width or kind of block is a graph: PerViT's four stages and their ends, LSAT's local block and its levels.
LOSS = label_loss(TrainConfig())  # nothing compiled, no teacher
GRAPHS = {"pervit_t": 7, "convit_ti": 2, "deit_t": 1, "lsat_t_224": 7, "posmlp_t": 4, "gmlp_s": 1}
LIMITS = {"fp32": 1e-6, "bf16": 1e-2}  # relative; traced backward passes add in another order

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which Inductor uses on a CPU")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """One process that thinks it is a world; compilers begin anew and write into the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(INDUCTOR, "")
    monkeypatch.setenv(TRITON, "")
    torch.compiler.reset()
    counters.clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, CPU, 1)
    dist.destroy_process_group()
    torch.compiler.reset()


def small_pervit(checkpointing: bool = False, depths: tuple[int, int, int, int] = (1, 1, 0, 0)) -> PerViT:
    """Two blocks of other widths, BatchNorm, Φp, stochastic depth."""
    torch.manual_seed(0)
    layout = PerViTLayout(2, (16, 32, 32, 32), (8, 8, 16, 16), depths)
    return PerViT(layout, num_classes=10, image_size=32, drop_path=0.2, activation_checkpointing=checkpointing)


def micro_batch(size: int = 4) -> Any:
    """What the loss and the model need of a batch."""
    labels, generator = torch.arange(size), torch.Generator().manual_seed(1)
    images, weight = torch.randn(size, 3, 32, 32, generator=generator), torch.rand(size, generator=generator)
    return SimpleNamespace(images=images, labels=labels, other_labels=(labels + 3) % 10, weight=weight)


def plain() -> Objective:
    return Objective(LOSS)


def gradients(
    model: VisionModel, batch: Any, noise: Tensor, precision: str, objective: Objective | None = None
) -> tuple[float, Tensor]:
    """Loss and all gradients of one micro-batch."""
    model.zero_grad()
    with autocast(CPU, precision):
        scores = model(batch.images, noise)
    value = (objective or plain())(scores, batch)
    value.backward()
    return value.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        *((name, {}) for name in SIZES),
        ("deit_t", {"peripheral_position": True}),
        ("deit_t", {"conditional_position": 2}),
        ("deit_t", {"relative_position": True}),
    ],
)
def test_no_graph_break_in_a_block(name: str, switches: dict) -> None:
    """Guards against a block that Dynamo cannot trace as a whole, and against one graph for each of many equal blocks."""
    torch.compiler.reset()
    counters.clear()
    model = create_model(name, num_classes=10, image_size=SIZES[name], drop_path=0.1, switches=switches)
    images, noise = torch.randn(2, 3, SIZES[name], SIZES[name]), torch.rand(2, model.noise_per_sample)
    compile_tables_as_constants()
    torch._dynamo.config.recompile_limit = 64
    for path, module in model.named_modules():
        if re.fullmatch(r"(.*\.)?blocks\.\d+", path):
            module.forward = torch.compile(module.forward, backend="eager", fullgraph=True, dynamic=False)
    model(images, noise)
    assert not counters["graph_break"] and graphs() == GRAPHS[name]


@pytest.mark.parametrize("kind, checkpointing, precision", [("blocks", False, "bf16"), ("model", True, "fp32")])
def test_a_compiled_step_is_the_same(
    kind: str, checkpointing: bool, precision: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against gradients that compiling changes, names of parameters that it changes, BatchNorm statistics that trying it
    out changes, graphs for every micro-batch of a step (BatchNorm's momentum) or size of an evaluation's batch, and probes that
    record nothing."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    model = small_pervit(checkpointing)
    batch, noise = micro_batch(), torch.rand(4, model.noise_per_sample)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = gradients(model, batch, noise, precision)
    model.load_state_dict(state)

    statistics = StepStatistics(model, world)
    statistics.begin()
    compilation = Compilation(kind, precision, tmp_path / "run", world, model, objective := plain(), False)
    compilation.prepare(batch, noise, accumulates=True)
    assert compilation.kind == kind and not compilation.pending
    assert list(model.state_dict()) == list(state) and list(dict(model.named_parameters())) == [
        n for n, _ in small_pervit().named_parameters()
    ]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not counters["graph_break"]

    compiled = graphs()
    assert compiled == (2 if kind == "model" else 4)  # the model, or two blocks and Φp; and the loss
    for number in range(3):
        statistics.micro_batch(number)
        loss, gradient = gradients(model, batch, noise, precision, objective)
        assert loss == pytest.approx(expected[0], rel=LIMITS[precision])
        assert (gradient - expected[1]).norm() < LIMITS[precision] * expected[1].norm()
    statistics.end(taken=True)
    with recorded("phi_p") as values:
        model(batch.images, noise)
    assert len(values["phi_p"]) == 2
    model.eval()
    with torch.no_grad():
        for size in (3, 2):
            model(batch.images[:size])
    assert graphs() == compiled


@needs_compiler
@pytest.mark.soak
@pytest.mark.skipif(os.environ.get("PERVIT_SOAK") != "1", reason="part of the soak: set PERVIT_SOAK=1")
def test_inductor_gives_the_same_gradients(world: World, tmp_path: Path) -> None:
    """Guards against what only generated code gets wrong; the fused operations round in another order."""
    model = small_pervit(depths=(1, 0, 0, 0))
    batch, noise = micro_batch(), torch.rand(4, model.noise_per_sample)
    reference = copy.deepcopy(model)
    expected = gradients(reference, batch, noise, "fp32")
    compilation = Compilation("blocks", "fp32", tmp_path / "run", world, model, objective := plain(), False)
    compilation.prepare(batch, noise, accumulates=False)
    assert compilation.kind == "blocks"
    loss, gradient = gradients(model, batch, noise, "fp32", objective)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    assert (gradient - expected[1]).norm() < 1e-5 * expected[1].norm()
    folder = cache_folder(tmp_path / "run", 0)
    assert any(folder.rglob("*.cpp")) and folder.is_relative_to(tmp_path / "cache")
    compilation.drop_cache()
    assert not folder.exists()


def test_a_failure_leaves_everything_as_it_was(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Guards against a run that ends because a node has no compiler, and against a half-compiled model. The backward pass fails,
    which is compiled last."""

    def no_backward(graph: Any, inputs: Any) -> Any:
        raise FileNotFoundError("g++ is not here\nand much more")

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=no_backward)
    monkeypatch.setattr(compiling, "BACKEND", backend)
    model = small_pervit()
    batch, noise = micro_batch(), torch.rand(4, model.noise_per_sample)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = gradients(copy.deepcopy(model), batch, noise, "fp32")
    compilation = Compilation("blocks", "fp32", tmp_path / "run", world, model, objective := plain(), False)
    compilation.prepare(batch, noise, accumulates=False)
    assert compilation.kind == "off" and objective == plain() and not compilation.pending
    (warning,) = capsys.readouterr().err.splitlines()
    assert (
        warning.startswith("warning: train.compile=blocks failed (") and "g++ is not here" in warning and "more" not in warning
    )
    assert not any({"forward", "class_scores", "log_phi"} & vars(module).keys() for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    loss, gradient = gradients(model, batch, noise, "fp32", objective)
    assert loss == expected[0] and torch.equal(gradient, expected[1])


@pytest.mark.parametrize(
    "options, device, chosen",
    [
        ({}, CPU, "off"),
        ({}, CUDA, "blocks"),
        ({"zero_stage": 3}, CUDA, "off"),
        ({"compile": "off", "zero_stage": 3}, CUDA, "off"),
        ({"compile": False}, CUDA, "off"),  # YAML's off
        ({"compile": "model"}, CPU, "model"),
        ({"compile": "graphs"}, CUDA, "graphs"),
        ({"compile": "blocks", "zero_stage": 3}, CPU, "train.compile=blocks requires train.zero_stage 0, 1 or 2, got 3"),
        ({"compile": "graphs"}, CPU, "train.compile=graphs requires a CUDA GPU, got cpu"),
        (
            {"compile": "graphs", "activation_checkpointing": True},
            CUDA,
            "requires train.activation_checkpointing=false, got true",
        ),
    ],
)
def test_the_choice(options: dict[str, Any], device: torch.device, chosen: str) -> None:
    """Guards against a setting that the ZeRO stage or the device cannot have and that is silently another one."""
    config, world = of_train(**options), World(rank=0, size=2, device=device, cpu_threads=1)
    if chosen in ("off", "blocks", "model", "graphs"):
        assert choose_compilation(config, world) == chosen
    else:
        with pytest.raises(UserError, match=chosen):
            choose_compilation(config, world)


def of_train(**options: Any) -> Config:
    return Config(output_dir="runs/x", train=TrainConfig(**options))


ONE_PASS = {"global_batch_size": 64, "micro_batch_size": 64}


@pytest.mark.parametrize(
    "options, chosen",
    [
        (ONE_PASS, "graphs"),
        ({**ONE_PASS, "zero_stage": 3}, "graphs"),  # which one process runs as stage 0
        ({**ONE_PASS, "zero_stage": 3, "compile": "model"}, "model"),
        ({"global_batch_size": 128, "micro_batch_size": 64}, "blocks"),
        ({"global_batch_size": 64, "micro_batch_size": "auto"}, "blocks"),
        ({**ONE_PASS, "activation_checkpointing": True}, "blocks"),
        ({**ONE_PASS, "deterministic": True}, "blocks"),
        ({**ONE_PASS, "teacher": "runs/teacher"}, "blocks"),
    ],
)
def test_the_choice_on_one_gpu(options: dict[str, Any], chosen: str) -> None:
    """Guards against a step that the CPU holds up although it can be one graph, and a graph of what cannot be."""
    assert choose_compilation(of_train(**options), World(rank=0, size=1, device=CUDA, cpu_threads=1)) == chosen


def test_each_node_of_each_run_has_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against nodes that overwrite each other's code, against code that a stranger has put there, and against a place
    of the user's choice that is ignored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = {cache_folder(tmp_path / run, rank) for run in ("a", "b") for rank in (0, 1)}
    assert len(folders) == 4 and cache_folder(tmp_path / "a", 0) in folders

    def opened(run: str) -> Path:
        monkeypatch.setenv(INDUCTOR, "")
        monkeypatch.setenv(TRITON, "")
        return open_compile_cache(tmp_path / run, 0)

    folder = opened("a")
    assert folder == cache_folder(tmp_path / "a", 0) and folder.stat().st_mode & 0o777 == 0o700
    drop_compile_cache(tmp_path / "a", 0)
    assert not folder.parent.exists()
    cache_folder(tmp_path / "b", 0).mkdir(parents=True)
    cache_folder(tmp_path / "b", 0).chmod(0o777)
    assert not opened("b").is_relative_to(tmp_path / "cache")
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "mine"))
    assert open_compile_cache(tmp_path / "a", 0) == tmp_path / "mine"
