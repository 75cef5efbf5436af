"""``pytest --quick``: the tests that start no process, build no full-size model, compile none and run no DALI, by what they do.

A test runs until it does one of these; then it is skipped. No marker says which tests these are, so there is none to forget.
"""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from nvidia.dali.pipeline import Pipeline
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

PARAMETERS = 400_000  # in all models that a test builds; the smallest published one of 224 pixels has over ten times as many
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")  # of sys.audit


class Quick:
    """The plugin. It changes this process for good: what it watches cannot be given back."""

    def __init__(self) -> None:
        self._in_test, self._parameters = False, 0
        sys.addaudithook(lambda event, _: self._skip("starts a process", event in _STARTS))
        process: Any = multiprocessing.process.BaseProcess
        process.start = self._before(process.start, "starts a process")
        torch.compile = self._before(torch.compile, "compiles a model")
        torch.export.export = self._before(torch.export.export, "traces a model")
        Pipeline.__init__ = self._before(Pipeline.__init__, "runs DALI")  # before its graph is made
        register_module_parameter_registration_hook(self._count)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._in_test, self._parameters = True, 0
        try:
            return (yield)
        finally:
            self._in_test = False

    def _skip(self, does: str, when: bool = True) -> None:
        if self._in_test and when:
            pytest.skip(f"{does}: `make test` runs it")

    def _before(self, function: Callable[..., Any], does: str) -> Callable[..., Any]:
        def checked(*arguments: Any, **more: Any) -> Any:
            self._skip(does)
            return function(*arguments, **more)

        return checked

    def _count(self, module: object, name: str, parameter: torch.Tensor | None) -> None:
        if self._in_test and parameter is not None:  # on the device meta too: what is counted and traced there takes seconds
            self._parameters += 0 if is_lazy(parameter) else parameter.numel()
            self._skip("builds a full-size model", self._parameters > PARAMETERS)
