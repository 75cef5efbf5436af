"""``train.deterministic``: what it switches, what it refuses, and that a resume with it is bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.checkpoint.weights import read_weights
from pipeline.errors import UserError
from pipeline.models import create_model
from pipeline.step.precision import make_deterministic, refusals_explained
from support import launching
from support.launching import run_module
from support.ranks import run_forked
from support.runs import step_rows
from support.small_run import SMALL_MODEL

# Operations that raise on a GPU in this mode: the list in the documentation of torch.use_deterministic_algorithms, as operators.
REFUSED = {
    "adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward",
    "avg_pool3d_backward", "bincount", "cumsum", "_embedding_bag_dense_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "histc", "kthvalue",
    "max_pool3d_with_indices_backward", "max_unpool2d", "max_unpool3d", "median", "nll_loss2d_forward", "nll_loss2d_backward", "put_",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward", "resize_", "upsample_bicubic2d_backward", "upsample_bilinear2d_backward",
    "upsample_linear1d_backward", "upsample_trilinear3d_backward", "_upsample_bicubic2d_aa_backward", "_upsample_bilinear2d_aa_backward",
}  # fmt: skip


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode, for one test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = (
        before
    )


class Operators(TorchDispatchMode):
    """Notes the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_it_sets_pytorch_cudnn_and_cublas(deterministic: None) -> None:
    """Guards against a half-set mode: attention adds in a fixed order only if refusals are errors, cuBLAS only with a workspace."""
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_users_workspace_stays(deterministic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # deterministic too, with less memory
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_refusal_is_a_sentence(deterministic: None) -> None:
    """Guards against PyTorch's traceback and its advice to file an issue."""
    with pytest.raises(
        UserError,
        match="train.deterministic=true requires a deterministic form of put_, which .*: set train.deterministic=false",
    ):
        with refusals_explained():
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    with pytest.raises(RuntimeError, match="shape"), refusals_explained():  # any other error stays what it is
        torch.zeros(3).view(2)


@pytest.mark.parametrize(
    ("name", "side"),
    [("pervit_t", 32), ("convit_ti", 32), ("deit_t", 32), ("lsat_t_224", 56), ("posmlp_t", 32), ("gmlp_s", 32)],
)
def test_no_model_needs_what_a_gpu_refuses(name: str, side: int, deterministic: None) -> None:
    """Guards against a family that trains on CPUs in this mode and ends on a GPU with a refusal."""
    model = create_model(name, 10, side)
    with FakeTensorMode(allow_non_fake_inputs=True), Operators() as seen:  # the operators alone, without their work
        loss = cross_entropy(model(torch.randn(2, 3, side, side)), torch.tensor([0, 1]))
        torch.autograd.grad(loss, list(model.parameters()))
    assert {"convolution_backward", "mm"} <= seen.names
    assert not seen.names & REFUSED


@pytest.mark.multiprocess
def test_a_run_trains_in_this_mode_and_may_change_it(small_run: Path, tmp_path: Path) -> None:
    """Guards against a key that ends a run on a CPU, changes what it computes there, or cannot be changed on a resume."""
    starts = {"plain": [("false", 4)], "changed": [("true", 2), ("false", 4)]}
    for run, modes in starts.items():
        for mode, last in modes:
            options = [f"output_dir={tmp_path / run}", f"train.max_steps={last}", f"train.deterministic={mode}", SMALL_MODEL[0]]
            run_forked("pipeline.train", "--config", small_run, *options)
    plain, changed = (step_rows(tmp_path / run) for run in starts)
    assert [row["loss"] for row in plain] == [row["loss"] for row in changed]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_deterministic_resume_on_a_gpu_is_bit_for_bit(
    precision: str, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against attention's backward pass, cuDNN or cuBLAS adding in another order after a resume."""
    plain = launching.clean_environment
    monkeypatch.setattr(launching, "clean_environment", lambda: {**plain(), "CUDA_VISIBLE_DEVICES": "0"})
    options = ["train.deterministic=true", f"train.precision={precision}", "data.num_threads=2", "train.micro_batch_size=8"]
    for run, ends in (("straight", [20]), ("resumed", [11, 20])):
        for last in ends:
            folder, end = f"output_dir={tmp_path / run}", f"train.max_steps={last}"
            run_module("pipeline.train", "--config", small_run, folder, end, *options)
    straight, resumed = (step_rows(tmp_path / run) for run in ("straight", "resumed"))
    assert [row["loss"] for row in straight] == [row["loss"] for row in resumed]
    first, second = (read_weights(tmp_path / run).model for run in ("straight", "resumed"))
    assert all(torch.equal(second[name], value) for name, value in first.items())
