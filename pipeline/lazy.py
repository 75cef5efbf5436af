"""Import late: lazy package imports (PEP 562), a module is loaded when one of its names is first used, so that ``--help`` need not load
PyTorch; libraries that an extra installs; and what a config names as ``module:name``."""

import importlib
import os
import sys
from collections.abc import Callable
from functools import reduce
from types import ModuleType
from typing import Any

from pipeline.errors import UserError, first_line, missing_extra


def lazy_names(package: str, **modules: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package's ``__init__`` calls instead of importing (PEP 562): its ``__getattr__``, ``__dir__`` and ``__all__``.
    ``modules``: module of the package -> the names that the package has from it, separated by spaces."""
    home = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{home[name]}", package), name)
        setattr(sys.modules[package], name, value)  # the next time it is simply there
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home}), sorted(home)


def import_library(module: str, user: str, package: str = "", extra: str = "") -> ModuleType:
    """A module that ``user``, such as a config key, requires, of a ``package`` that an ``extra`` installs; both are called like the
    module where nothing is said. Raises UserError: it is not installed, or does not load beside this PyTorch."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # missing, or its operators are of another build of PyTorch: RuntimeError or OSError
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == module.partition(".")[0]
        raise missing_extra(user, package or module, extra or module, error=None if missing else error) from None


def import_named(key: str, name: str, what: str) -> Any:
    """What ``name``, the ``module:Class`` of the config's ``key``, stands for; the module is installed, on PYTHONPATH or in the
    current folder. Raises UserError: it cannot be imported; ``what`` it must be is such as "a class that can be imported, as
    module:Class"."""
    module, _, attribute = name.partition(":")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # Python itself does so for `python -m`, but not for `pervit`
    try:
        return reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # whatever a module of somebody else raises
        problem = f"{key} must be {what}, got {name} ({type(error).__name__}: {first_line(error)})"
        raise UserError(problem, "correct it, or put the folder of the module on PYTHONPATH") from None
