"""The Triton kernels compiled for GPUs, which needs none, and the operator in a graph that torch.compile traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._subclasses import FakeTensorMode

triton = pytest.importorskip("triton", reason="needs Triton, which the extra `test` installs")
from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.attention_resources import (  # noqa: E402
    CAPABILITIES,
    KERNELS,
    MAX_SHARED,
    MAX_SPILLED,
    PHI_KERNELS,
    compiled,
    compiled_phi,
    head_widths,
)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_kernel_fits_its_gpu(capability: int) -> None:
    """Guards against tiles that overflow registers or shared memory, products without matrix instructions, sums in no fixed
    order, and heads at odd places, which are read by 2 bytes. benchmarks/attention_resources.py compiles for all widths."""
    for kernel in KERNELS:
        found = compiled(kernel, heads=12, width=45, capability=capability)
        assert found.shared <= MAX_SHARED[capability] and found.spilled <= MAX_SPILLED[capability], (kernel, found)
        assert found.matrix and not found.atomic, (kernel, found)
        # On Hopper the gradients were measured to be faster without loads ahead.
        assert found.narrow == 0 and (16 in found.copies or capability == 90 and kernel.endswith("gradient")), (kernel, found)


def test_the_widest_head_fits() -> None:
    """Guards against PerViT-T's 70 channels, which take tiles of 128, overflowing registers."""
    for kernel in KERNELS:
        found = compiled(kernel, heads=4, width=70, capability=90)
        assert found.shared <= MAX_SHARED[90] and found.spilled <= MAX_SPILLED[90] and not found.atomic, (kernel, found)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("heads", [4, 12])
def test_the_maps_of_phi_fit(heads: int, capability: int) -> None:
    """Guards against the same in the kernels of Φp, which spilled kilobytes while their nine taps were unrolled."""
    for kernel in PHI_KERNELS:
        found = compiled_phi(kernel, heads, capability)
        assert found.shared <= MAX_SHARED[capability] and found.spilled == 0 and not found.atomic, (kernel, found)


def test_head_widths_are_those_of_the_supplement() -> None:
    """Guards against a table of widths that no model has (Table S5)."""
    assert head_widths("pervit_m") == [(12, 26), (12, 39), (12, 45), (12, 57)]


class GPU:
    """What tracing asks of Triton's driver, which does not load without a GPU."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tracing_sees_the_kernels_and_what_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an operator that torch.compile cannot look into, that autocast does not reach there, or whose inputs are copied
    because they might be written."""
    from pipeline.kernels import fused  # noqa: F401

    monkeypatch.setattr(triton.runtime.driver, "_active", GPU())

    def attention(qkv: Tensor, log_phi: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.ops.pervit.peripheral_attention(qkv, log_phi, 57)[0]

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with FakeTensorMode(allow_non_fake_inputs=True):
        qkv = torch.empty(8, 196, 3, 4, 64, requires_grad=True)
        log_phi = torch.empty(4, 196, 196, requires_grad=True)
        out = aot_function(attention, fw_compiler=keep, bw_compiler=keep)(qkv, log_phi)
        out.sum().backward()
    assert (out.dtype, out.shape) == (torch.bfloat16, (8, 196, 4, 64)) and out.is_contiguous()
    assert qkv.grad is not None and qkv.grad.shape == qkv.shape
    assert log_phi.grad is not None and log_phi.grad.shape == log_phi.shape
    calls = [[node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)] for graph in graphs]
    written = [[node.kwargs["tensors_to_clone"] for node in nodes] for nodes in calls]
    assert written == [[["out", "log_sums"]], [["dqkv", "deltas"], ["dqkv"], ["sums"]]]
    for node in calls[0] + calls[1]:
        assert node.kwargs["kwargs"]["qkv"].meta["val"].dtype == torch.bfloat16
        assert node.kwargs["kwargs"]["log_phi"].meta["val"].dtype == torch.float32
