"""The engine without ZeRO: beside a plain loop of PyTorch, at steps that are skipped, and from and to ZeRO's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipeline.cluster.world import World
from pipeline.config import Config, config_from_dict
from pipeline.models import create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import ViTLayout
from pipeline.models.deit import DeiT
from pipeline.optim.averages import StepStatistics, WeightAverage
from pipeline.optim.build import build_optimizer
from pipeline.optim.engine import build_engine, choose_zero_stage, micro_batches, set_learning_rate
from pipeline.optim.plain_engine import PlainEngine
from pipeline.step.captured_step import what_hinders
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import StepResult, TrainState, forward_backward, random_batch, train_step
from pipeline.training import compiling

STEPS, MICRO_BATCHES, LR, DECAY, CLIP = 20, 2, 0.001, 0.9, 0.3
SIDE, CLASSES = 32, 16


@pytest.fixture(scope="module")
def alone() -> Iterator[World]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"), 1)
    dist.destroy_process_group()


def config(precision: str = "fp32", **optim: Any) -> Config:
    train = {"micro_batch_size": 4, "global_batch_size": 4 * MICRO_BATCHES, "precision": precision, "zero_stage": 0}
    model = {"image_size": SIDE, "num_classes": CLASSES}
    sections = {"model": model, "train": train, "optim": {"weight_decay": 0.1, **optim}, "augment": {"mixup": 0, "cutmix": 0}}
    return config_from_dict(sections, source="the test")


def small_model(checkpointed: bool = False) -> VisionModel:
    """A PerViT with every kind of layer, BatchNorm too."""
    torch.manual_seed(0)
    model = create_model("pervit_t", CLASSES, SIDE, switches={"widths": [12, 12, 12, 12]})
    model.activation_checkpointing = checkpointed
    return model


def small_deit() -> VisionModel:
    """A model of which each tensor fills vector registers: the last numbers of others are rounded otherwise in AdamW's kernel on a
    CPU, and a flat tensor has few that are last."""
    torch.manual_seed(0)
    return DeiT(ViTLayout(heads=4, width=32, depth=2, mlp_ratio=2), num_classes=CLASSES, image_size=SIDE)


def batches(count: int, settings: Config) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    made = [random_batch(settings.train.micro_batch, settings.model, torch.device("cpu")) for _ in range(count)]
    for batch in made:
        batch.images.copy_(torch.randn(batch.images.shape, generator=generator))
    return made


class Trained:
    """A small model in the engine, with averages, and the steps that it takes."""

    def __init__(self, settings: Config, world: World, model: VisionModel | None = None) -> None:
        self.model = model or small_model()
        self.engine: Any = build_engine(self.model, settings, world)
        self.average = WeightAverage(self.engine, DECAY)
        objective = Objective(label_loss(settings.train))
        self.state = TrainState(self.engine, StepStatistics(self.model, world), self.average, objective)
        self.engine.train()

    def step(self, images: list[Any]) -> StepResult:
        following = iter(images)
        return train_step(self.state, lambda: next(following), LR, seed=0)

    def everything(self) -> dict[str, Tensor]:
        """All that a checkpoint has, copied."""
        states = self.engine.optimizer.state.values()
        kept = {f"{number}.{key}": value for number, state in enumerate(states) for key, value in state.items()}
        averages = {f"ema.{name}": value for name, value in {**self.average.averages, **self.average.buffers}.items()}
        return {name: value.clone() for name, value in {**self.model.state_dict(), **kept, **averages}.items()}


class Loop:
    """The same in a plain loop of PyTorch: autocast, ``clip_grad_norm_``, one tensor after the other."""

    def __init__(self, settings: Config, world: World, model: VisionModel | None = None) -> None:
        self.settings, self.model = settings, (model or small_model()).train()
        self.optimizer = build_optimizer(self.model, settings.optim)
        self.statistics = StepStatistics(self.model, world)
        self.average = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def gradients(self, images: list[Any]) -> list[Tensor]:
        """Of a step, added up in the parameters; returns the losses."""
        objective, losses = Objective(label_loss(self.settings.train)), []
        self.statistics.begin()
        for number, batch in enumerate(images):
            self.statistics.micro_batch(number)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.train.precision == "bf16"):
                scores = self.model(batch.images)
            loss = objective(scores, batch)
            (loss / len(images)).backward()
            losses.append(loss.detach())
        return losses

    def step(self, images: list[Any]) -> tuple[float, float]:
        losses = self.gradients(images)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.optim.clip_grad_norm or 1e9)
        for group in self.optimizer.param_groups:
            group["lr"] = LR
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.statistics.end(taken=True)
        for name, parameter in self.model.named_parameters():
            self.average[name].lerp_(parameter.detach(), 1 - DECAY)
        return float(torch.stack(losses).mean()), float(norm)


@pytest.mark.parametrize("precision, clip", [("fp32", None), ("bf16", None), ("fp32", CLIP)])
def test_twenty_steps_are_those_of_a_plain_loop(precision: str, clip: float | None, alone: World) -> None:
    """Guards against another loss, norm, weight or average than PyTorch's own. Clipping depends on the norm, whose sum has another order:
    a last bit differs."""
    settings = config(precision, clip_grad_norm=clip)
    ours, plain = Trained(settings, alone, small_deit()), Loop(settings, alone, small_deit())
    found, expected = [], []
    for number in range(STEPS):
        images = batches(MICRO_BATCHES, settings)
        for batch in images:
            batch.images.add_(number / 10)
        result = ours.step(images)
        found.append((float(result.loss), float(result.grad_norm)))
        expected.append(plain.step(images))
    assert min(norm for _, norm in expected) > CLIP  # it clips
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=0)
    if clip is None:
        assert [loss for loss, _ in found] == [loss for loss, _ in expected]
    pairs = [(ours.model.state_dict(), plain.model.state_dict()), (ours.average.averages, plain.average)]
    for name, value, other in ((name, value, others[name]) for values, others in pairs for name, value in values.items()):
        if clip is None:
            assert torch.equal(value, other), name
        elif "qkv.bias" not in name:  # the part of k has no gradient but rounding, which AdamW makes a step of
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_autograds_to_the_bit(precision: str, checkpointed: bool, alone: World) -> None:
    """Guards against a weight whose bf16 copy computes otherwise than autocast's cast, and gradients that are lost, or added in bf16."""
    settings = config(precision)
    ours, plain = Trained(settings, alone, small_model(checkpointed)), Loop(settings, alone, small_model(checkpointed))
    images = batches(MICRO_BATCHES, settings)
    plain.gradients(images)
    of_loop = dict(plain.model.named_parameters())
    names = {parameter: name for name, parameter in ours.model.named_parameters()}
    computed_in = set()
    for number in micro_batches(ours.engine):
        ours.engine.prepare(images[number].images, None)
        computed_in = {parameter.dtype for parameter in ours.model.parameters()}
        forward_backward(ours.engine, ours.engine.backward, images[number], None, ours.state.objective)
        ours.engine.step()
    assert computed_in == ({torch.float32, torch.bfloat16} if precision == "bf16" else {torch.float32})
    assert {parameter.dtype for parameter in ours.model.parameters()} == {torch.float32}
    for parameter, gradient in zip(ours.engine.flat.parameters, ours.engine.flat.views(ours.engine.flat.gradients)):
        assert torch.equal(gradient, of_loop[names[parameter]].grad), names[parameter]


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon", "torch.optim:NAdam", "torch.optim:Adagrad"])
def test_a_skipped_step_changes_nothing(optimizer: str, alone: World) -> None:
    """Guards against a weight, moment, count of steps, average or statistic that a step without a finite gradient has touched, and
    against NaN that stays in what pads the gradients. The step after it is that of a run which never saw the bad images."""
    beside = {} if optimizer in ("adamw", "lamb", "muon") else {"name": optimizer}
    settings = config(clip_grad_norm=CLIP, **(beside or {"name": optimizer}))
    skipping, straight = Trained(settings, alone), Trained(settings, alone)
    good, bad = batches(MICRO_BATCHES, settings), batches(MICRO_BATCHES, settings)
    bad[1].images[0, 0, 0, 0] = torch.nan
    for trained in (skipping, straight):
        assert trained.step(good).taken
    before = skipping.everything()
    result = skipping.step(bad)
    assert not result.taken and not torch.as_tensor(result.grad_norm).isfinite()
    after = skipping.everything()
    assert before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    assert skipping.step(good).taken and straight.step(good).taken
    expected = straight.everything()
    assert all(torch.equal(value, expected[name]) for name, value in skipping.everything().items())


def test_a_gpus_memory_decides_about_stage_one() -> None:
    """Guards against a stage that saves next to nothing and waits for the device, and one that is refused where memory is short."""
    settings = config_from_dict({}, source="the test")
    gib, parameters = 2**30, 44_000_000
    assert choose_zero_stage(settings, 8, lambda: parameters, 80 * gib) == (
        0,
        "auto: stage 1 saves 0.29 GiB, 0.4% of a GPU's 80",
    )
    assert choose_zero_stage(settings, 8, lambda: 100 * parameters, 80 * gib)[0] == 1
    assert choose_zero_stage(settings, 8, lambda: parameters, None) == (1, "auto: the devices are CPUs")
    assert choose_zero_stage(settings, 1, lambda: parameters, None) == (0, "")
    adagrad = config_from_dict({"optim": {"name": "torch.optim:Adagrad"}}, source="the test")
    assert choose_zero_stage(adagrad, 8, lambda: parameters, 1) == (0, "auto: torch.optim:Adagrad needs whole parameters")


def test_parts_are_summed_in_one_order(alone: World) -> None:
    """Guards against ranks that begin reductions in different orders, and against a part that is one half of a parameter."""
    engine = Trained(config(), alone).engine
    assert isinstance(engine, PlainEngine)
    parts = engine.flat.parts
    assert 2 <= len(parts) <= 4 and [part.begin for part in parts[1:]] == [part.end for part in parts[:-1]]
    set_learning_rate(engine, LR)
    numbers = [number for part in parts for number in part.numbers]
    assert numbers == list(range(len(engine.flat.parameters)))


def test_compiled_code_computes_with_the_copies(alone: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against code that is compiled for float32 weights before their copies are made, and again for these in the next step."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setenv(compiling.INDUCTOR, str(tmp_path))
    settings, graphs, losses = config("bf16"), [], []
    for kind in ("blocks", "off"):
        trained = Trained(settings, alone, small_deit())
        compilation = compiling.Compilation(kind, "bf16", tmp_path, alone, trained.model, trained.state.objective, False)

        def before_forward(batch: Any, noise: Tensor | None, compilation: compiling.Compilation = compilation) -> None:
            if compilation.pending:
                compilation.prepare(batch, noise, accumulates=True)

        torch.compiler.reset()
        counters.clear()
        for _ in range(2):
            images = iter(batches(MICRO_BATCHES, settings))
            result = train_step(trained.state, lambda images=images: next(images), LR, 0, before_forward)  # type: ignore[misc]
            losses.append(float(result.loss))
            graphs.append(counters["stats"]["unique_graphs"])
        assert compilation.kind == kind
    assert losses[:2] == losses[2:]
    assert graphs[0] == graphs[1] == 2 and graphs[2:] == [0, 0]  # a block, and the loss


def test_a_step_that_decides_on_the_device_is_the_same(alone: World) -> None:
    """Guards against other weights where the learning rate is a tensor, as in a captured step, than with the same number, and against a step
    that is taken, or touches anything, after one skip too many: the host hears of that one late."""
    settings = config(clip_grad_norm=CLIP)
    plain, ours = Trained(settings, alone, small_deit()), Trained(settings, alone, small_deit())
    ours.engine.decide_on_the_device(1)
    for number in range(STEPS):
        images, lr = batches(MICRO_BATCHES, settings), float(torch.tensor(LR / (1 + number)))  # what float32 can hold
        for batch in images:
            batch.images.add_(number / 10)
        for trained in (plain, ours):
            following = iter(images)
            assert train_step(trained.state, lambda: next(following), lr, seed=0).taken  # noqa: B023
    expected = plain.everything()
    assert all(torch.equal(value, expected[name]) for name, value in ours.everything().items())

    good, bad = batches(MICRO_BATCHES, settings), batches(MICRO_BATCHES, settings)
    bad[0].images[0, 0, 0, 0] = torch.nan
    assert not ours.step(bad).taken and ours.step(good).taken  # one is allowed
    before = ours.everything()
    assert not ours.step(bad).taken and not ours.step(good).taken
    assert all(torch.equal(value, before[name]) for name, value in ours.everything().items())


def test_what_cannot_be_captured_is_named(alone: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a graph that holds a decision of the host, and against a run that ends where capturing fails: here is no GPU."""
    settings = config()
    state = Trained(settings, alone, small_deit()).state
    assert what_hinders(state) == "a step has several micro-batches"
    one = settings.with_values({"train.global_batch_size": settings.train.micro_batch})
    state = Trained(one, alone, small_deit()).state
    assert what_hinders(state) is None
    assert what_hinders(replace(state, objective=Objective(state.objective.label_loss, lambda images: images))) is not None
    lamb = Trained(one.with_values({"optim.name": "lamb"}), alone, small_deit()).state
    assert what_hinders(lamb) == "the optimizer decides on the host"
    compilation = compiling.Compilation("graphs", "fp32", tmp_path, alone, state.engine.module, state.objective, captures=True)
    compilation.capture(state, batches(1, one)[0], seed=0)
    assert compilation.kind == "model" and not compilation.captures and state.captured is None
    (warning,) = caplog.messages
    assert warning.endswith("the run continues as with train.compile=model")
