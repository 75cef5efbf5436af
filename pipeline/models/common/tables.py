"""Constant tables: functions of sizes, device and dtype alone, computed once and shared by layers and steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table", bound=Callable[..., Tensor])
_SIZES = 16  # tables of a function that are kept: a model has a handful of grids and windows
_tables: list[Callable[..., Tensor]] = []


def constant_table(compute: Table) -> Table:
    """Decorator: compute a table once for each combination of arguments, which are hashable.

    The tensor is not an inference tensor even if the first call is one of inference mode: it must serve a later training step.
    Nor is a fake tensor kept, which has no values: ``torch.export`` and the compiler call a model with such.
    """

    @lru_cache(maxsize=_SIZES)
    def computed(*arguments: object, **named: object) -> Tensor:
        with torch.inference_mode(False):
            return compute(*arguments, **named)

    @wraps(compute)
    def table(*arguments: object, **named: object) -> Tensor:
        found = computed(*arguments, **named)
        if type(found) is not Tensor:
            computed.cache_clear()
        return found

    _tables.append(table)
    return table  # type: ignore[return-value]  # the signature of compute


def compile_tables_as_constants() -> None:
    """Let ``torch.compile`` take the tables as constants. It ignores caches, and would compute them in every step."""
    for table in _tables:
        torch.compiler.assume_constant_result(table)  # here because it imports the compiler, which takes a second
