"""Read the model that is analyzed, and tell before the pass over images what its analysis will show; choose figures by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.analysis.chapter import Findings, Request
from pipeline.analysis.chapters import chapter_classes, chapters_of
from pipeline.config import Config, config_from_dict
from pipeline.errors import UserError
from pipeline.inference.trained import read_trained
from pipeline.models import create_model, list_models, model_entry
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.gated_mlp.posmlp import PosMLP
from pipeline.models.lsat.model import LSAT
from pipeline.models.timm_names import is_timm


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, on the CPU, and where it is from.

    Attributes:
        config: of its training; for fresh weights, the defaults with this model.
        classes: class names by output index; empty for fresh weights, which fit any.
        origin: ``checkpoint`` as given, ``step`` (None: fresh), ``weights`` (``model``, ``ema`` or ``fresh``). JSON.
    """

    model: VisionModel
    config: Config
    classes: list[str]
    origin: dict[str, object]


def read_subject(source: str, step: int | str | None = None, seed: int = 0) -> Subject:
    """Read a run folder, one of its checkpoints or an exported file, or build the model of that name with fresh weights.

    Raises:
        UserError: neither a path nor a model's name; damaged; weights not finite; a step of fresh weights.
    """
    path = Path(source)
    if path.exists() or "/" in source or path.suffix:
        trained = read_trained(path, step)
        origin = {"checkpoint": source, "step": trained.step, "weights": trained.kind}
        return Subject(trained.build_model(), trained.config, trained.classes, origin)
    if not is_timm(source) and source not in list_models():
        raise UserError(
            f"{source} is neither a file or folder nor a model",
            f"pass a run folder, an exported file, or one of {', '.join(list_models())}",
        )
    if step is not None:
        raise UserError(f"--step is {step}, but {source} is a model with fresh weights", "leave it out, or pass a run folder")
    its = model_entry(source)
    tree = {"model": {"name": source, "image_size": its.image_size, "num_classes": its.num_classes}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model(source, its.num_classes, its.image_size).eval()
    origin = {"checkpoint": source, "step": None, "weights": "fresh"}
    return Subject(model, config_from_dict(tree, source=source), [], origin)


@torch.no_grad()
def weights_findings(request: Request) -> Findings:
    """What the weights alone show; figures that need images are omitted, and so are named.

    Args:
        request: without examples.
    """
    findings = Findings()
    for chapter in chapters_of(request):
        chapter.collectors()  # which see nothing
        chapter.add_findings(findings)
    return findings


def check_has_chapter(model: VisionModel, name: str) -> None:
    """Check that an analysis has anything to say of the model.

    Args:
        model: in eval mode.
        name: its name.

    Raises:
        UserError: it is of no family that has a chapter: a model of timm.
    """
    if not any(chapter.applies(model) for chapter in chapter_classes()):
        raise UserError(f"pipeline.analyze requires a model of this project's families, got {name}", "analyze one of them")


def check_names(only: Sequence[str], findings: Findings, model: str) -> None:
    """Check the names given to ``--only``.

    Args:
        only: the names; empty: all.
        findings: of the weights, see :func:`weights_findings`.
        model: its name.

    Raises:
        UserError: the model has no figure of that name, whether the name is wrong or another family's.
    """
    known = [plot.name for plot in findings.plots] + list(findings.omitted)
    for name in only:
        if not any(_is_of(each, name) or _is_of(name, each) for each in known):
            has = f"it has {', '.join(dict.fromkeys(known))}" if known else "no figure is known for it"
            raise UserError(
                f"{model} has no figure {name!r}, {has}", "pass some of these to --only" if known else "choose another model"
            )


def restrict(findings: Findings, only: Sequence[str]) -> Findings:
    """The findings with the named figures alone; the numbers stay. Empty ``only``: all.

    Raises:
        UserError: none of them applies.
    """
    if not only:
        return findings
    plots = [plot for plot in findings.plots if any(_is_of(plot.name, name) for name in only)]
    omitted = {each: why for each, why in findings.omitted.items() if any(_is_of(each, name) for name in only)}
    if not plots:
        reasons = "; ".join(f"{name}: {why.rstrip('.')}" for name, why in omitted.items())
        raise UserError(f"none of the figures of --only can be made ({reasons})", "choose others, or see to the reasons")
    return Findings(findings.measures, findings.units, plots, omitted)


def needs_images(findings: Findings, only: Sequence[str]) -> bool:
    """Whether a pass over images can add anything to the figures asked for. Args: findings: of the weights."""
    complete = [plot.name for plot in findings.plots if not plot.more_with_images]
    return not only or not all(name in complete for name in only)


def check_query(model: VisionModel, image_size: int, query: tuple[int, int] | None) -> None:
    """Check that the query is inside the model's token grid, where there is one for all layers.

    Raises:
        UserError: it is not, or no figure of the model has a query.
    """
    if query is None:
        return
    if isinstance(model, LSAT):
        raise UserError(f"--query is {query[0]},{query[1]}, but LSAT's figures show all patches", "leave it out")
    # PosMLP's layers have grids of several sizes: the chapter knows them
    rows, columns = (image_size, image_size) if isinstance(model, PosMLP) else patch_grid(image_size, image_size)
    if not (0 <= query[0] < rows and 0 <= query[1] < columns):
        raise UserError(
            f"--query is {query[0]},{query[1]}, but the model has {rows} x {columns} tokens",
            f"pass a row from 0 to {rows - 1} and a column from 0 to {columns - 1}",
        )


def _is_of(figure: str, name: str) -> bool:
    """Whether a figure has the name, or the name and a number, ``maps_2``."""
    return figure == name or (figure.startswith(f"{name}_") and figure[len(name) + 1 :].isdigit())
