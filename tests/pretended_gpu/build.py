"""Build the libraries of the pretended GPU, and name the variables with which a program uses them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[1]
CUDA = "13"  # the version of PyPI's build, whose runtime the C++ files are written for
_PARTS = {"libpretended_gpu.so": ("counts.cpp", "runtime.cpp", "libraries.cpp"), "libcuda.so.1": ("driver.cpp",)}


def missing() -> str | None:
    """What this environment lacks, as the reason of a skip; None if a program can be run."""
    import torch

    if not (torch.version.cuda or "").startswith(f"{CUDA}."):
        return f"needs PyPI's CUDA build of PyTorch (CUDA {CUDA})"
    if _compiler() is None:
        return "needs a C++ compiler for the pretended GPU"
    return None


def build() -> Path:
    """Compile what is not in the cache yet; returns the folder with the libraries."""
    import torch

    text = "".join(path.read_text() for path in sorted(FOLDER.glob("*.[ch]*")))
    name = hashlib.sha256(f"{torch.__version__}\n{text}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pervit" / "pretended_gpu"
    if (cache / name).is_dir():
        return cache / name
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache))
    for library, sources in _PARTS.items():
        command = [str(_compiler()), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{_headers()}", "-o", str(made / library)]
        subprocess.run([*command, *(str(FOLDER / source) for source in sources)], check=True)
    try:
        made.rename(cache / name)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return cache / name


def variables() -> dict[str, str]:
    """The environment variables with which a program has the pretended GPU."""
    folder = str(build())

    def in_front(variable: str, *parts: str) -> str:
        return ":".join([*parts, *filter(None, [os.environ.get(variable)])])

    return {
        "LD_PRELOAD": in_front("LD_PRELOAD", f"{folder}/libpretended_gpu.so"),
        "LD_LIBRARY_PATH": in_front("LD_LIBRARY_PATH", folder),
        "TRITON_LIBCUDA_PATH": folder,
        "PYTHONPATH": in_front("PYTHONPATH", str(FOLDER.parent), str(REPOSITORY)),
        "CUDA_VISIBLE_DEVICES": "0",
    }


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def _headers() -> Path:
    """CUDA's headers, which Triton brings."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None  # PyTorch's CUDA build requires it
    return Path(spec.origin).parent / "backends" / "nvidia" / "include"
