"""peripheral_attention on a CPU without Triton's interpreter: the plain form, and who decides."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.kernels import peripheral, peripheral_attention
from support.attention import random_case
from support.launching import REPOSITORY, clean_environment


def test_a_cpu_computes_what_it_always_did() -> None:
    """Guards against another rounding on CPUs, where runs continue bit for bit."""
    qkv, log_phi, dout = random_case(3, 2, 20, 26, torch.float32)
    results = []
    for function in (
        lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, attn_mask=b[None], scale=26**-0.5),
        peripheral_attention,
    ):
        out = function(*qkv.unbind(0), log_phi)
        results.append((out, *torch.autograd.grad(out, (qkv, log_phi), dout)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_the_plain_form_are_right() -> None:
    """Guards against a reference that is itself wrong: its gradients against finite differences."""
    qkv, log_phi, _ = random_case(2, 2, 5, 3, torch.float64)
    q, k, v = (part.detach().requires_grad_() for part in qkv.unbind(0))
    assert torch.autograd.gradcheck(peripheral_attention, (q, k, v, (log_phi / 10).detach().requires_grad_()))


def test_a_compiled_model_contains_the_plain_form_alone() -> None:
    """Guards against a graph break in every block: the choice is made while the graph is traced."""
    qkv, log_phi, _ = random_case(1, 2, 5, 8, torch.float32)
    q, k, v = qkv.detach().unbind(0)
    compiled = torch.compile(peripheral_attention, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, log_phi.detach()), peripheral_attention(q, k, v, log_phi.detach()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels would run")
def test_a_gpu_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback where the kernels cannot run, and against a silent fallback where they are asked for."""
    with FakeTensorMode():
        q = torch.empty(2, 3, 5, 8, device="cuda")
    peripheral._find_obstacle.cache_clear()
    assert not peripheral.uses_triton(q)
    monkeypatch.setattr(peripheral, "_ASKED", peripheral.TRITON)
    with pytest.raises(
        UserError, match="PERVIT_ATTENTION=triton requires the Triton kernels .* but PyTorch has no NVIDIA GPU here: "
    ):
        peripheral.uses_triton(q)


PROGRAM = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from pipeline.errors import UserError
from pipeline.kernels import peripheral_attention
q = torch.ones(1, 1, 4, 8)
try:
    print(peripheral_attention(q, q, q, torch.zeros(1, 4, 4)).mean().item())
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({}, "1.0"),
        ({"TRITON_INTERPRET": "1", "PERVIT_ATTENTION": "plain"}, "1.0"),
        ({"PERVIT_ATTENTION": "triton"}, "1.0"),  # is for GPUs: a training counts a model's FLOPs on the CPU
        (
            {"TRITON_INTERPRET": "1"},
            "TRITON_INTERPRET requires the Triton kernels of attention, but triton is not installed: "
            "pip install --no-deps -c constraints.txt triton.",
        ),
        (
            {"PERVIT_ATTENTION": "fast"},
            "PERVIT_ATTENTION must be auto, triton or plain, got 'fast': set the environment variable to one of these.",
        ),
    ],
    ids=["nothing set", "plain", "triton on a CPU", "interpreter", "unknown"],
)
def test_without_triton(environment: dict[str, str], answer: str) -> None:
    """Guards against a package that needs Triton where it does not use it, and against a foreign traceback where it does."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPOSITORY, env=clean_environment(**environment), capture_output=True, text=True
    )
    assert done.stdout.strip() == answer, done.stderr
