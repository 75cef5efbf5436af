"""The count of live tensors in a trace without values."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.planning.trace import PARAMETERS, WEIGHT_COPIES, Trace


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    """Guards against views that are counted again, and against temporaries that are kept or missed."""
    with FakeTensorMode(), Trace() as live:
        with live.labelled("a"):
            whole = torch.empty(1000)
        view = whole[:10].view(2, 5)
        del whole
        assert live.live["a"] == 4000
        with live.labelled("b"):
            result = (view + 1).sum()  # 40 bytes for a moment, and 4 that stay
        assert live.peak_total == 4000 + 40 + 4
        del view
        assert live.total == 4
        live.relabel(result, "c")
        assert +live.live == {"c": 4}


def test_a_backward_pass_frees_what_it_has_used() -> None:
    """Guards against a count in which saved tensors outlive their use."""
    with FakeTensorMode(), Trace() as live:
        with live.labelled(PARAMETERS):
            weight = torch.nn.Parameter(torch.empty(64, 64))
        with live.labelled("activations"):
            loss = torch.nn.functional.gelu(torch.empty(8, 64) @ weight).sum()
        assert live.live["activations"] > 2 * 8 * 64 * 4
        loss.backward()
        del loss
        assert live.live["activations"] == 0
        assert live.total == 2 * 64 * 64 * 4  # the weight and its gradient


def test_autocasts_copies_of_weights_have_their_own_label() -> None:
    with FakeTensorMode(), Trace() as live:
        with live.labelled(PARAMETERS):
            layer = torch.nn.Linear(16, 16, bias=False)
        with torch.autocast("cpu", torch.bfloat16):
            kept = layer(torch.empty(2, 16, requires_grad=True))  # whose gradient needs the copy
        assert live.live[WEIGHT_COPIES] == 16 * 16 * 2
        del kept
