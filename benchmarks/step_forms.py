"""The training steps that :mod:`benchmarks.step` compares: one function each, on a fixed batch of random images."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.step_authors import authors_form, authors_loss
from benchmarks.step_timing import Step
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.loader.loader import Batch
from pipeline.models import create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.pervit.model import PerViT
from pipeline.optim.build import build_optimizer
from pipeline.optim.engine import build_engine, optimizer_step
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import forward_backward

OURS, PLAIN, AUTHORS, COMPILED = "ours", "plain PyTorch", "authors' form", "ours, compiled"
_COMPILING = "pipeline.training.compiling"  # train.compile, where this version has it


@dataclass(frozen=True)
class Setting:
    """What all forms of one comparison share."""

    config: Config  # model, recipe, micro-batch, precision
    classes: int
    world: World

    def model(self) -> VisionModel:
        torch.manual_seed(self.config.seed)
        model = self.config.model
        built = create_model(
            model.name,
            self.classes,
            model.image_size,
            model.drop_path,
            self.config.train.activation_checkpointing,
            switches=model.switches,
        )
        return built.to(self.world.device).train()

    def batch(self) -> Batch:
        device, size, count = self.world.device, self.config.model.image_size, self.config.train.micro_batch_size
        labels = torch.randint(self.classes, (2, count), device=device)
        return Batch(
            images=torch.randn(count, 3, size, size, device=device),
            labels=labels[0],
            other_labels=labels[1],
            weight=torch.rand(count, device=device),
            valid=torch.ones(count, dtype=torch.bool, device=device),
            request=cast(Any, None),  # no sample of a data set
            replaced=0,
        )

    def noise(self, model: VisionModel) -> Tensor | None:
        count = model.noise_per_sample
        return torch.rand(self.config.train.micro_batch_size, count, device=self.world.device) if count else None

    def autocast(self) -> Any:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")


def forms(setting: Setting, compiled: bool) -> dict[str, Step]:
    """The forms that this model has, by name; ``ours`` first."""
    steps = {OURS: ours(setting), PLAIN: plain(setting)}
    if compiled:
        steps[COMPILED] = ours(setting, compiled=True)
    if isinstance(setting.model(), PerViT) and not setting.config.model.switches:
        steps[AUTHORS] = authors(setting)
    return steps


def ours(setting: Setting, compiled: bool = False) -> Step:
    """What ``pipeline.train`` does between two batches, through DeepSpeed's engine."""
    config = setting.config
    engine, batch = build_engine(setting.model(), config, setting.world), setting.batch()
    noise = setting.noise(engine.module)
    objective = Objective(label_loss(config.train))
    if compiled:
        compilation = importlib.import_module(_COMPILING).Compilation(
            config.train.compile,
            config.train.precision,
            Path(config.output_dir),
            setting.world,
            engine.module,
            objective,
            False,
        )
        compilation.prepare(batch, noise, False)

    def step() -> None:
        forward_backward(engine, engine.backward, batch, noise, objective)
        optimizer_step(engine)

    return step


def plain(setting: Setting) -> Step:
    """Our model, loss and optimizer without DeepSpeed."""
    config, model, batch = setting.config, setting.model(), setting.batch()
    noise, optimizer = setting.noise(model), build_optimizer(model, config.optim)
    objective = Objective(label_loss(config.train))

    def step() -> None:
        with setting.autocast():
            scores = model(batch.images, noise)
        objective(scores, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def authors(setting: Setting) -> Step:
    """The authors' form of model, loss and optimizer."""
    config, batch = setting.config, setting.batch()
    model = authors_form(cast(PerViT, setting.model()))
    noise, optimizer = setting.noise(model), torch.optim.AdamW(model.parameters(), lr=config.optim.warmup_lr)
    own, other = (F.one_hot(labels, setting.classes).float() for labels in (batch.labels, batch.other_labels))
    targets = batch.weight[:, None] * own + (1 - batch.weight[:, None]) * other  # (B, classes)

    def step() -> None:
        with setting.autocast():
            loss = authors_loss(model(batch.images, noise), targets)
        loss.item()  # the published loop looks at every loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def can_compile() -> bool:
    """Whether this version has ``train.compile``."""
    return importlib.util.find_spec(_COMPILING) is not None
