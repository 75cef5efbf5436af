"""State dicts in files of ``torch.save``, read without running what a pickle may name.

A pickle is a program: unpickling calls the functions that it names. ``weights_only`` restricts them to those that make tensors.
"""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.files import open_regular


def read_pickled(path: Path, what: str) -> dict[str, Tensor]:
    """Read a state dict, at the top level or under ``model`` or ``state_dict``.

    Args:
        path: a file that ``torch.save`` wrote.
        what: the file for messages, such as ``train.init_from weights.pth``.

    Raises:
        UserError: it cannot be read, names something that could run code, or holds no state dict.
    """
    try:
        # The papers' checkpoints hold their command line as a Namespace, which keeps what it is given and runs nothing.
        with open(open_regular(path), "rb") as file, torch.serialization.safe_globals([Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes can raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if foreign := re.search(
            r"Unsupported (?:global|class): GLOBAL (\S+)|Trying to load unsupported GLOBAL (\S+)", str(error)
        ):
            reason = f"it also holds a {foreign[1] or foreign[2]}, which could run code"
        raise UserError(
            f"{what} cannot be read ({reason})",
            "pass a file that torch.save or safetensors wrote, with a state dict alone",
        ) from None
    found = loaded.get("model", loaded.get("state_dict", loaded)) if isinstance(loaded, dict) else loaded
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{what} holds no state dict, names with tensors needed", "pass another file")
    return found
