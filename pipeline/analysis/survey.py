"""What an analysis of a model will show, before its pass over images begins, and the choice of figures by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.analysis.chapter import Request
from pipeline.analysis.chapters import chapter_classes, chapters_of
from pipeline.analysis.findings import Findings
from pipeline.errors import UserError
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.models.convit.model import ConViT
from pipeline.models.gated_mlp.gmlp import GMLP
from pipeline.models.lsat.model import LSAT
from pipeline.models.pervit.phi_model import PhiModel


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
        raise UserError(
            f"{name} is of no family that pipeline.analyze has figures for", "analyze one of this project's families"
        )


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
    if isinstance(model, PhiModel):
        rows, columns = model.token_grid(torch.empty(1, 3, image_size, image_size, device="meta"))
    elif isinstance(model, ConViT | GMLP):
        rows, columns = patch_grid(image_size, image_size)
    else:
        rows = columns = image_size  # PosMLP's layers have grids of several sizes: the chapter knows them
    if not (0 <= query[0] < rows and 0 <= query[1] < columns):
        raise UserError(
            f"--query is {query[0]},{query[1]}, but the model has {rows} x {columns} tokens",
            f"pass a row from 0 to {rows - 1} and a column from 0 to {columns - 1}",
        )


def _is_of(figure: str, name: str) -> bool:
    """Whether a figure has the name, or the name and a number, ``maps_2``."""
    return figure == name or (figure.startswith(f"{name}_") and figure[len(name) + 1 :].isdigit())
