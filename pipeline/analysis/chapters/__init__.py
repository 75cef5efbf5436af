"""Describe each model family in chapters; :func:`chapters_of` picks those that apply."""

from __future__ import annotations

import importlib

from pipeline.analysis.chapter import Chapter, Request

_CHAPTERS = (  # class and module of this package, in the page's order
    "attention.AttentionChapter deit.DeiTChapter pervit_maps.MapsChapter pervit.RegionsChapter pervit_maps.ImagesChapter "
    "pervit.PerViTChapter pervit_extremes.ExtremesChapter convit.ConViTChapter lsat.LSATChapter gated_mlp.GatedMLPChapter"
).split()


def chapters_of(request: Request) -> list[Chapter]:
    """The chapters that apply to the model, in the page's order."""
    return [each(request) for each in chapter_classes() if each.applies(request.model)]


def chapter_classes() -> list[type[Chapter]]:
    """All of them, in the page's order."""
    pairs = (chapter.split(".") for chapter in _CHAPTERS)
    return [getattr(importlib.import_module(f"{__name__}.{module}"), name) for module, name in pairs]
