"""Whether the NVIDIA driver is new enough for the CUDA builds of PyTorch and DALI, said in one sentence before they fail."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from pipeline.errors import UserError

# The oldest driver for all releases of a CUDA generation ("CUDA Toolkit Release Notes", table of minor version compatibility).
OLDEST_DRIVER = {12: "525.60.13", 13: "580"}
_VERSION_FILES = (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version"))
_ON_THE_CPU = "or set CUDA_VISIBLE_DEVICES= (empty) to use the CPU"


def gpu_is_usable() -> bool:
    """Whether PyTorch finds a GPU. A GPU that it cannot use is an installation error, not a request to train on the CPU.

    Raises:
        UserError: there is a driver, the user has not hidden the GPUs, and PyTorch or DALI cannot use it.
    """
    with warnings.catch_warnings(record=True) as caught:  # PyTorch warns of what follows in its own words
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        check_dali(installed_driver(), _cuda_of_driver())
    elif os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        said = [str(each.message) for each in caught if "CUDA initialization" in str(each.message)]
        raise no_gpu_found(installed_driver(), torch.version.cuda, said[0] if said else "")
    return usable


def no_gpu_found(driver: str | None, cuda: str | None, said: str = "") -> UserError:
    """The error for a machine with a driver on which PyTorch finds no GPU.

    Args:
        driver: version of the driver, "535.104.05"; None: not known.
        cuda: the CUDA version that PyTorch was built for, "13.0"; None: the CPU build.
        said: PyTorch's warning, "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020). ...".
    """
    name = f"PyTorch {torch.__version__}"
    if not cuda:
        return UserError(
            f"this machine has an NVIDIA driver, but {name} is the CPU build and finds no GPU",
            f"install the CUDA build with `make install HAS_GPU=1` in the repository, {_ON_THE_CPU}",
        )
    major = int(cuda.partition(".")[0])
    supported = re.search(r"too old \(found version (\d+)\d{3}\)", said)  # 12020: CUDA 12.2
    older = driver and major in OLDEST_DRIVER and _numbers(driver) < _numbers(OLDEST_DRIVER[major])
    if major in OLDEST_DRIVER and (supported or older):
        return too_old(driver, name, major, int(supported[1]) if supported else None)
    why = re.split(r"\.\s|, e\.g\.|\n", said.partition("CUDA initialization: ")[2])[0]
    return UserError(
        f"this machine has NVIDIA driver {driver or 'of unknown version'}, but {name} for CUDA {cuda} finds no GPU{f' ({why})' if why else ''}",
        f"see whether nvidia-smi lists one and what CUDA_VISIBLE_DEVICES says, {_ON_THE_CPU}",
    )


def check_dali(driver: str | None, cuda_of_driver: int) -> None:
    """Refuse a build of DALI that the driver is too old for, although PyTorch's build works.

    Args:
        driver: version of the driver, for the sentence.
        cuda_of_driver: newest CUDA version that the driver supports, as 1000 * major + 10 * minor; a compatibility package
            (cuda-compat) counts.

    Raises:
        UserError: DALI is there for a later generation of CUDA only.
    """
    builds = [major for major in OLDEST_DRIVER if _is_installed(f"nvidia-dali-cuda{10 * major}")]
    if builds and cuda_of_driver and max(builds) > cuda_of_driver // 1000:
        raise too_old(driver, "the installed DALI", max(builds), cuda_of_driver // 1000)


def too_old(driver: str | None, what: str, cuda: int, supported: int | None = None) -> UserError:
    """The error for a driver that is older than a package's generation of CUDA needs.

    Args:
        driver: its version; None: not known.
        what: the package.
        cuda: the generation of CUDA that it was built for.
        supported: the generation that the driver supports; None: as its version says.
    """
    needed = OLDEST_DRIVER[cuda]
    if supported is None:
        supported = max((each for each in OLDEST_DRIVER if _numbers(driver or "") >= _numbers(OLDEST_DRIVER[each])), default=0)
    remedy = f"have driver {needed} or later installed"
    if 12 <= supported < cuda:
        remedy = f"run `make install CUDA=12` in the repository, whose packages this driver suffices for, {remedy}"
    return UserError(
        f"the NVIDIA driver is {driver or 'of unknown version'}, but {what} is for CUDA {cuda}, which needs driver {needed} or later",
        f"{remedy}, {_ON_THE_CPU}",
    )


def installed_driver() -> str | None:
    """Version of the kernel's NVIDIA driver; None if there is none, or it does not say."""
    for path in _VERSION_FILES:
        try:
            return driver_version(path.read_text(errors="replace"))
        except OSError:
            continue
    return None


def driver_version(text: str) -> str | None:
    """From either file: "535.104.05", or "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."."""
    found = re.search(r"\b\d{3,}(?:\.\d+)+\b", text)
    return found[0] if found else None


def _numbers(text: str) -> tuple[int, ...]:
    """A version for comparison; empty, so older than all others, if it has no numbers."""
    return tuple(map(int, re.findall(r"\d+", text)))


def _cuda_of_driver() -> int:
    """1000 * major + 10 * minor of the newest CUDA version that the driver supports; 0 if it does not say."""
    found = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return found.value


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False
