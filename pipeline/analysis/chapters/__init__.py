"""A chapter for each model family. :func:`chapters_of` picks those that apply."""

from __future__ import annotations

import importlib

from pipeline.analysis.chapter import Chapter, Request

_CHAPTERS = {
    "attention": "AttentionChapter",
    "lsat": "LSATChapter",
    "gated_mlp": "GatedMLPChapter",
}  # module of this package -> its class, in the page's order


def chapters_of(request: Request) -> list[Chapter]:
    """The chapters that apply to the model, in the page's order."""
    classes = [getattr(importlib.import_module(f"{__name__}.{module}"), name) for module, name in _CHAPTERS.items()]
    return [each(request) for each in classes if each.applies(request.model)]
