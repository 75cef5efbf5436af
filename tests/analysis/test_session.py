"""Figures chosen by name: which of them need images, which names are known; queries of models that have none."""

from __future__ import annotations

import pytest

from pipeline.analysis.chapter import Findings, Request
from pipeline.analysis.session import chapters_of, check_names, check_query, findings_of, needs_images
from pipeline.errors import UserError
from pipeline.models import create_model


def of_weights(name: str, **switches: object) -> Findings:
    """What the weights of a model on 4 x 4 patches show."""
    return findings_of(chapters_of(Request(create_model(name, 5, 64, switches=switches).eval(), 64)))


def test_a_figure_to_which_images_add_has_the_pass() -> None:
    """Guards against Ωp alone where --data would give Ωc and Ωa too, and against a pass that adds nothing."""
    pervit = of_weights("pervit_t")
    assert needs_images(pervit, ["nonlocality"]) and needs_images(pervit, ["phi_p", "impact"]) and needs_images(pervit, [])
    assert not needs_images(pervit, ["phi_p", "regions"])
    assert not needs_images(of_weights("pervit_t", phi_c=False), ["nonlocality"])
    convit = of_weights("convit_ti")
    assert needs_images(convit, ["initial_positions"]) and not needs_images(convit, ["gates", "position_maps"])


def test_figures_of_single_images_are_known_before_the_images() -> None:
    """Guards against `--only attention_image`, which the documentation names, being refused while there are no images yet."""
    pervit, convit = of_weights("pervit_t"), of_weights("convit_ti")
    check_names(["attention_images", "attention_image", "attention_image_2"], pervit, "pervit_t")
    check_names(["attention_maps", "attention_maps_2"], convit, "convit_ti")
    with pytest.raises(UserError, match="pervit_t has no figure 'attention_maps'"):
        check_names(["attention_maps"], pervit, "pervit_t")


def test_a_query_of_a_model_without_one_is_refused() -> None:
    """Guards against figures that look as if they were of the query: LSAT's are of all patches."""
    lsat = create_model("lsat_t_32", 5, 32)
    check_query(Request(lsat, 32))
    with pytest.raises(UserError, match="--query is 1,2, but LSAT's figures show all patches: leave it out"):
        check_query(Request(lsat, 32, (1, 2)))
