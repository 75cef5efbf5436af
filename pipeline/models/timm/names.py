"""Know timm's names, of models (``timm:NAME``), of its weights in the Hugging Face hub and of the files in its folders, without timm and
PyTorch."""

import importlib.util
import os
import re
from functools import cache
from pathlib import Path

from pipeline.errors import UserError, did_you_mean, first_line, missing_extra
from pipeline.lazy import import_library

TIMM_PREFIX = "timm:"
# timm's default tags of the architectures that this project has too, by the word that their names begin with.
_TAGS = {"convit": "fb_in1k", "deit": "fb_in1k", "gmlp": "ra3_in1k"}
CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"


def is_timm(name: str) -> bool:
    """Whether ``model.name`` is one of timm's models."""
    return name.startswith(TIMM_PREFIX)


def check_timm_name(name: str) -> None:
    """See that timm has the model ``timm:NAME``, without importing timm. Raises UserError: timm is not installed, it has no
    such model, or the name is of weights, a folder or a repository."""
    architecture = name.removeprefix(TIMM_PREFIX)
    if ":" in architecture or "/" in architecture:
        problem = f"model.name must be a name of timm's list, got {name}, a folder or a repository"
        raise UserError(problem, "write timm:NAME, and give local weights to train.init_from")
    if importlib.util.find_spec("timm") is None:
        raise missing_extra(f"model.name {name}", "timm", "timm")
    known = defined_names()
    plain, dot, tag = architecture.partition(".")
    if dot and plain in known:
        problem = f"model.name must be an architecture, got {name}, whose part {tag!r} names weights"
        raise UserError(problem, f"write model.name={TIMM_PREFIX}{plain} train.init_from={name}")
    if known and architecture not in known:
        hint = did_you_mean(plain, known, "timm.list_models() has the names", f"{TIMM_PREFIX}{{}}")
        raise UserError(f"model.name must be a model of timm's list, got {name}", hint)


@cache
def defined_names() -> frozenset[str]:
    """Every name that timm's source files register; empty if they look otherwise than expected, when timm itself decides later."""
    spec = importlib.util.find_spec("timm")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder, "models").glob("*.py")]
    registers = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)
    return frozenset(name for file in files for name in registers.findall(file.read_text(encoding="utf-8")))


def is_timm_folder(path: Path) -> bool:
    """Whether a folder is meant to be of timm's layout, whole or not."""
    return path.is_dir() and any((path / name).is_file() for name in (CONFIG, WEIGHTS, PICKLED))


def weights_folder(source: str) -> Path:
    """The folder in timm's layout with the weights ``timm:NAME.TAG``, downloaded from the hub unless it is in its cache. Raises
    UserError: the hub has no such weights or cannot be reached, ``huggingface_hub`` is missing, or there is no tag."""
    name = source.removeprefix(TIMM_PREFIX)
    tag = "" if "." in name else _TAGS.get(name.partition("_")[0])
    if tag is None:
        problem = f"train.init_from must name weights as timm:NAME.TAG, got {source}"
        raise UserError(problem, "take a name of https://huggingface.co/timm")
    hub = import_library("huggingface_hub", f"train.init_from={source}", extra="hub")
    repository = f"timm/{name}.{tag}".rstrip(".")
    try:
        endpoint = os.environ.get("HF_ENDPOINT")  # which it reads itself only when it is imported
        return [Path(hub.hf_hub_download(repository, file, endpoint=endpoint)).parent for file in (CONFIG, WEIGHTS)][-1]
    except Exception as error:  # of the network, the hub or the disk
        download = f"run `hf download {repository} --local-dir FOLDER` where there is a network, and set train.init_from=FOLDER"
        where = f"https://huggingface.co/{repository} ({first_line(error)})"
        problem = f"train.init_from {source} cannot be downloaded from {where}"
        raise UserError(problem, f"correct the name, or {download}") from None
