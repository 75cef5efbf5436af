"""An NVIDIA driver that is too old for the installed packages: what the libraries say, and what we make of it."""

from __future__ import annotations

import warnings

import pytest
import torch

from pipeline.cluster import host
from pipeline.errors import UserError

# c10/cuda/CUDAFunctions.cpp
TOO_OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver. "
    "(Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)"
)
UNKNOWN = (
    "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero. (Triggered internally at /pytorch/c10)"
)


@pytest.mark.parametrize(
    ("supported", "cuda", "said", "expected"),
    [
        (12020, "13.0", TOO_OLD, "PyTorch .* is built for CUDA 13.0 and the driver supports CUDA 12.2: run `make install CUDA=12` in the repository "
         "for packages that this driver supports, install a newer driver, or set CUDA_VISIBLE_DEVICES="),
        (11040, "12.6", "", "built for CUDA 12.6 and the driver supports CUDA 11.4: install a newer driver, or set CUDA_VISIBLE_DEVICES="),
        (13000, "13.0", UNKNOWN, r"for CUDA 13.0 finds no GPU \(CUDA unknown error - this .* environment\): check whether nvidia-smi"),
        (0, "13.0", "", "for CUDA 13.0 finds no GPU: check whether nvidia-smi"),
        (13000, None, "", "is the CPU build: install the CUDA build with `make install HAS_GPU=1`"),
    ],
)  # fmt: skip
def test_no_gpu_beside_a_driver(supported: int, cuda: str | None, said: str, expected: str) -> None:
    """Guards against advice that does not mend: another build for a broken driver, a new driver for the wrong build."""
    with pytest.raises(UserError, match=f"the NVIDIA GPU of this machine cannot be used: .*{expected}"):
        raise host.no_gpu_found(supported, cuda, said.partition("CUDA initialization: ")[2])


def test_pytorchs_warning_becomes_the_error(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """Guards against PyTorch's paragraph above our sentence, and against a training on the CPU of a GPU node."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("os.path.exists", lambda path: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(host, "cuda_of_driver", lambda: 12020)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(TOO_OLD, stacklevel=1)))
    with pytest.raises(UserError, match="is built for CUDA 13.0 and the driver supports CUDA 12.2"):
        host.gpu_is_usable()
    assert not recwarn.list
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user's wish for the CPU
    assert host.gpu_is_usable() is False


def test_dali_needs_a_newer_driver_than_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "CUDA driver version is insufficient for CUDA runtime version" from the middle of DALI."""
    builds = {"nvidia-dali-cuda130": True, "nvidia-dali-cuda120": False}
    monkeypatch.setattr(host, "_is_installed", builds.get)
    host.check_dali(13000)
    host.check_dali(0)  # not known
    with pytest.raises(
        UserError, match="the installed DALI is built for CUDA 13 and the driver supports CUDA 12.2.*make install CUDA=12"
    ):
        host.check_dali(12020)
    builds.update({"nvidia-dali-cuda130": False, "nvidia-dali-cuda120": True})
    host.check_dali(12020)
