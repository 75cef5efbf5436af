"""Lazy package imports (PEP 562): a module is loaded when one of its names is first used, so that ``--help`` need not load PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package's ``__init__`` calls instead of importing (PEP 562).

    Args:
        package: its ``__name__``.
        modules: module of the package -> the names that the package has from it, separated by spaces.

    Returns:
        The package's ``__getattr__``, ``__dir__`` and ``__all__``.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{home[name]}", package), name)
        setattr(sys.modules[package], name, value)  # the next time it is simply there
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home}), sorted(home)
