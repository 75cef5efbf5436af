"""Keys of ``optim`` with values that there are not."""

from __future__ import annotations

import pytest

from pipeline.config import config_from_dict
from pipeline.errors import UserError


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"name": "sdg"},
            " or a class as 'module:Class', got 'sdg'.",
        ),
        ({"layer_decay": 0}, "optim.layer_decay must be positive, got 0."),
        ({"layer_decay": 1.5}, "optim.layer_decay must be at most 1, got 1.5."),
        (
            {"options": {"betas": [0.9, 0.99]}},
            "optim.options requires optim.name=module:Class, got adamw: remove optim.options",
        ),
        (
            {"name": "a.b:C", "eps": 1e-3},
            "optim.eps must be left at its default with optim.name=a.b:C, got 0.001: set optim.options={eps: ...}",
        ),
        ({"name": "a.b:C", "options": {"lr": 1}}, "optim.options must not have lr, which the run sets: set optim.lr instead"),
        ({"momentum": 1.0}, "optim.momentum must be less than 1, got 1."),
        ({"name": "sgd", "momentum": 0}, "optim.momentum must be above 0 with optim.name=sgd, got 0: set it"),
    ],
)
def test_an_optimizer_that_there_is_not_is_one_sentence(keys: dict, sentence: str) -> None:
    """Guards against a traceback, or a default instead of what was asked for."""
    with pytest.raises(UserError) as error:
        config_from_dict({"output_dir": "runs/x", "optim": keys}, "a test")
    assert sentence in str(error.value) and "\n" not in str(error.value)
