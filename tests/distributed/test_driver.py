"""An NVIDIA driver that is too old for the installed packages: what the libraries say, and what we make of it."""

from __future__ import annotations

import warnings

import pytest
import torch

from pipeline.distributed import driver
from pipeline.errors import UserError

# /proc/driver/nvidia/version of the closed and of the open kernel module, and /sys/module/nvidia/version
FILES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)\n": "580.65.06",
    "470.57.02\n": "470.57.02",
    "?": None,
}
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


def test_the_version_of_the_driver() -> None:
    """Guards against a compiler's version, or half of one, in place of the driver's."""
    assert {text: driver.driver_version(text) for text in FILES} == FILES


@pytest.mark.parametrize(
    ("version", "cuda", "said", "expected"),
    [
        ("535.104.05", "13.0", TOO_OLD, "the NVIDIA driver is 535.104.05, but PyTorch .* is for CUDA 13, which needs driver 580 or later: "
         "run `make install CUDA=12` in the repository, whose packages this driver suffices for, have driver 580"),
        ("535.104.05", "13.0", "", "driver is 535.104.05.*make install CUDA=12"),
        (None, "13.0", TOO_OLD, "driver is of unknown version.*make install CUDA=12"),
        ("470.57.02", "13.0", "", "driver is 470.57.02, .*: have driver 580 or later installed, or set CUDA_VISIBLE_DEVICES="),
        ("470.57.02", "12.6", TOO_OLD.replace("12020", "11040"), "CUDA 12, which needs driver 525.60.13 or later: have driver 525.60.13"),
        ("580.65.06", "13.0", UNKNOWN, r"driver 580.65.06, .* finds no GPU \(CUDA unknown error - this .* environment\): see whether nvidia-smi"),
        ("580.65.06", None, "", "is the CPU build and finds no GPU: install the CUDA build with `make install HAS_GPU=1`"),
    ],
)  # fmt: skip
def test_no_gpu_beside_a_driver(version: str | None, cuda: str | None, said: str, expected: str) -> None:
    """Guards against advice that does not mend: another build for a broken driver, a new driver for the wrong build."""
    with pytest.raises(UserError, match=expected):
        raise driver.no_gpu_found(version, cuda, said)


def test_pytorchs_warning_becomes_the_error(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    """Guards against PyTorch's paragraph above our sentence, and against a training on the CPU of a GPU node."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("os.path.exists", lambda path: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(warnings.warn(TOO_OLD, stacklevel=1)))
    with pytest.raises(UserError, match="which needs driver 580 or later"):
        driver.gpu_is_usable()
    assert not recwarn.list
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the user's wish for the CPU
    assert driver.gpu_is_usable() is False


def test_dali_needs_a_newer_driver_than_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "CUDA driver version is insufficient for CUDA runtime version" from the middle of DALI."""
    builds = {"nvidia-dali-cuda130": True, "nvidia-dali-cuda120": False}
    monkeypatch.setattr(driver, "_is_installed", builds.get)
    driver.check_dali("580.65.06", 13000)
    driver.check_dali("535.104.05", 13000)  # with NVIDIA's compatibility package
    with pytest.raises(UserError, match="driver is 535.104.05, but the installed DALI is for CUDA 13.*make install CUDA=12"):
        driver.check_dali("535.104.05", 12020)
    builds.update({"nvidia-dali-cuda130": False, "nvidia-dali-cuda120": True})
    driver.check_dali("535.104.05", 12020)
