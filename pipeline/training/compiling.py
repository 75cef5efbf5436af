"""Compile parts of a training step with ``torch.compile`` (``train.compile``).

What is compiled replaces a method of its module's instance, so that modules, parameters and their names stay as they are, and
hooks, which DeepSpeed has on the model, run outside of the compiled code. Only training is compiled: evaluation, a teacher and
analyses run the modules themselves, so that the figures of a run are those of ``pipeline.evaluate``.

========== ==================================================================================
``blocks`` each transformer block, the maps Φp of all layers, and the loss
``model``  the forward pass as a whole, and the loss
``graphs`` as ``model``, captured as CUDA graphs: a step is one graph (:mod:`pipeline.step.captured_step`), or where it cannot be,
           the forward pass of a micro-batch and its backward pass are two
========== ==================================================================================

A requeued run finds its compiled code in the user's own cache folder: not in the run folder, from which nothing is ever run. The ranks of
a node share a folder: Inductor and Triton write a file under a name made of the process's number or at random, and rename it. Ranks of
different nodes, whose numbers may be equal, never do. Ranks with GPUs of one number compile the same graphs: one does, then the others
find them. Where each rank sees all GPUs of its node, a graph names its GPU, and all compile at once.
"""

import atexit
import fcntl
import gc
import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.cluster.host import this_node
from pipeline.cluster.world import World
from pipeline.errors import first_line
from pipeline.files import make_private, user_cache
from pipeline.loader.loader import Batch
from pipeline.logs.console import say_once
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import compile_tables_as_constants
from pipeline.models.common.probe import is_recording
from pipeline.step.captured_step import CapturedStep
from pipeline.step.loss import LabelLoss, Objective
from pipeline.step.precision import autocast
from pipeline.step.train_step import TrainState, forward_backward
from pipeline.terminal import duration

OFF, BLOCKS, MODEL, GRAPHS = "off", "blocks", "model", "graphs"
BACKEND: str | Callable[..., Any] = "inductor"  # of torch.compile; tests take others
_BLOCK = re.compile(r"(.*\.)?blocks\.\d+")  # how every family names them
_GRAPH_PASSES = 3  # a CUDA graph is warmed up, captured, and then replayed
_LONGEST_REASON = 300  # characters of a compiler's message in ours
# Read by Inductor and by Triton. Whoever sets them has chosen a place, which is left alone.
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_NAME_DIGITS = 16  # of a SHA-256: runs of one user do not share a folder by chance
_log = logging.getLogger(__name__)


class Compilation:
    """Compiles parts of the step at the first micro-batch of a start: the attribute ``kind`` becomes "off" if that fails, and "model" if
    capturing does. ``folder``: of the run, which names the one where compiled code is kept. ``objective`` gets the compiled loss.
    ``captures``: of "graphs", whether steps are to be captured as a whole."""

    def __init__(
        self, kind: str, precision: str, folder: Path, world: World, model: VisionModel, objective: Objective, captures: bool
    ) -> None:
        self._model_graphs, self.captures = kind == GRAPHS and not captures, captures
        self.kind, self._precision, self._run_folder = kind, precision, folder
        self._world, self._model, self._objective = world, model, objective
        self.pending, self._first_rank = kind != OFF, world.rank  # whether :meth:`prepare` is to be called
        self._replaced: list[tuple[nn.Module, str]] = []
        self._eager_loss: LabelLoss = objective.label_loss
        self._hooks: list[Any] = []

    def prepare(
        self, batch: Batch, noise: Tensor | None, accumulates: bool, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Compile, by a forward and backward pass on the first micro-batch, whose results are dropped. Collective.

        If that fails on any rank, all go on without: compiled code hands the gradients over in another order, which DeepSpeed's
        buckets need to be the same on all ranks. Nothing of a step was done by then. ``accumulates``: a step has several micro-batches.
        ``progress`` is called when the first ranks have compiled, for whom the others wait, and when all have.
        """
        self.pending, started = False, time.perf_counter()
        say_once(self._world, f"compiling (train.compile={self.kind}), which takes a minute or more")
        places = self._world.gather([this_node(), self._world.device.index or 0])
        nodes, failures = [node for node, _ in places], list[tuple[int, str]]()
        self._first_rank = nodes.index(nodes[self._world.rank])
        waits = [places.index(place) < rank for rank, place in enumerate(places)]  # for another rank to compile the same
        for turn in sorted(set(waits)):
            mine = waits[self._world.rank] == turn and not failures
            failure = _reason(partial(self._try_out, batch, noise, accumulates)) if mine else None
            failures = failures or [(rank, why) for rank, why in enumerate(self._world.gather(failure)) if why]
            progress()
        if not failures:
            parts = len(self._replaced) + 1  # the loss
            say_once(self._world, f"compiled {parts} parts of the step in {duration(time.perf_counter() - started)}")
            return
        self._remove()
        needed = "Triton and a C compiler" if self._world.device.type == "cuda" else "a C++ compiler"
        self._go_on_as(OFF, failures, f"the run continues without compiling, which needs {needed}; train.compile=off skips it")

    def capture(self, state: TrainState, batch: Batch, seed: int) -> None:
        """Capture the steps after the first one of a start, which is done. If that fails on any rank, all go on without. Collective."""
        self.captures, started = False, time.perf_counter()

        def attempt() -> None:
            state.captured = CapturedStep(state, batch, seed)

        failures = [(rank, why) for rank, why in enumerate(self._world.gather(_reason(attempt))) if why]
        if failures:
            state.captured = None
            gc.collect()  # what an exception kept of the step
            self._go_on_as(MODEL, failures, "steps cannot be captured, and the run continues as with train.compile=model")
        else:
            say_once(self._world, f"captured the step as a CUDA graph in {duration(time.perf_counter() - started)}")

    def _go_on_as(self, kind: str, failures: list[tuple[int, str]], consequence: str) -> None:
        """Warn of failures, (rank, why) of each."""
        rank, why = failures[0]
        where = f" on rank {rank}" if self._world.size > 1 else ""
        if self._world.is_main:
            _log.warning(f"train.compile={self.kind} failed{where} ({why}): {consequence}")
        self.kind, self.captures = kind, False

    def drop_cache(self) -> None:
        """The run is complete: nothing of it will be compiled again."""
        if self.kind != OFF:
            drop_compile_cache(self._run_folder, self._world.rank)

    def _install(self, accumulates: bool) -> None:
        import torch._dynamo as dynamo
        from torch._inductor import config as inductor

        open_compile_cache(self._run_folder, self._first_rank)
        compile_tables_as_constants()
        parts = list(self._parts())
        # One code object serves all blocks; each width and each set of options among them is a graph of its own.
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, 2 * len(parts))
        inductor.compile_threads = max(1, min(inductor.compile_threads or 1, self._world.cpu_threads))
        if torch.are_deterministic_algorithms_enabled() and hasattr(inductor, "deterministic"):
            inductor.deterministic = True  # no choice of a kernel by timing it
        for module, name in parts:
            self._replace(module, name, _compiled(getattr(module, name), graphs=self._model_graphs))
        # Never a CUDA graph: the step keeps its result beyond the next micro-batch.
        self._objective.label_loss = _compiled(self._eager_loss)
        if self._model_graphs and accumulates:
            # A graph's gradients lie in memory that its next replay overwrites, while AccumulateGrad would keep them as they are.
            self._hooks = [p.register_hook(torch.clone) for p in self._model.parameters() if p.requires_grad]

    def _parts(self) -> Iterator[tuple[nn.Module, str]]:
        """Modules and the names of their methods that are compiled."""
        if self.kind != BLOCKS:
            yield self._model.whole()
            return
        for name, module in self._model.named_modules():
            if _BLOCK.fullmatch(name) and not any(isinstance(part, _BatchNorm) for part in module.modules()):
                yield module, "forward"
        if self._model.has_phi:
            yield self._model, "log_phi"

    def _replace(self, module: nn.Module, name: str, compiled: Callable[..., Any]) -> None:
        eager = getattr(module, name)

        def run(*arguments: Any, **named: Any) -> Any:
            return (compiled if module.training and not is_recording() else eager)(*arguments, **named)

        setattr(module, name, run)
        self._replaced.append((module, name))

    def _remove(self) -> None:
        for module, name in self._replaced:
            delattr(module, name)
        for hook in self._hooks:
            hook.remove()
        self._replaced, self._hooks, self._objective.label_loss = [], [], self._eager_loss
        with suppress(Exception):  # whatever is broken there, it must not end the run
            torch.compiler.reset()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()

    def _try_out(self, batch: Batch, noise: Tensor | None, accumulates: bool) -> None:
        """What a step computes up to the gradients. They go nowhere: no hook of DeepSpeed sees them."""
        self._install(accumulates)
        model, objective = self._model, Objective(self._objective.label_loss)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        forward = autocast(self._world.device, self._precision)(model.forward)  # not the module's hooks, which are DeepSpeed's

        def backward(loss: Tensor) -> None:
            torch.autograd.grad(loss, trained, allow_unused=True)

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compilers about themselves
                for _ in range(_GRAPH_PASSES if self._model_graphs else 1):
                    forward_backward(forward, backward, batch, noise, objective)
                if self._world.device.type == "cuda":
                    torch.cuda.synchronize(self._world.device)  # a kernel that fails does so here
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _reason(attempt: Callable[[], None]) -> str | None:
    """Why an attempt fails on this rank, None if it does not."""
    try:
        attempt()
    except Exception as error:  # of Dynamo, Inductor, Triton, a compiler, CUDA, the file system: no interface names their types
        inner = getattr(error, "inner_exception", None) or error
        return f"{type(inner).__name__}: {first_line(inner)}"[:_LONGEST_REASON]
    return None


def _compiled(function: Callable[..., Any], graphs: bool = False) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, backend=BACKEND, mode="reduce-overhead" if graphs else None)


def open_compile_cache(run_folder: Path, rank: int) -> Path:
    """Point the compilers at the folder of the node whose first rank is ``rank``, or at a temporary one of this process where the user's
    cache folder cannot hold it."""
    if chosen := _chosen(INDUCTOR):
        return Path(chosen)
    folder = cache_folder(run_folder, rank)
    if folder is None or not _is_usable(folder):
        folder = Path(tempfile.mkdtemp(prefix="pervit-compile-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[INDUCTOR] = str(folder)
    if not _chosen(TRITON):
        os.environ[TRITON] = str(folder / "triton")
    return folder


def drop_compile_cache(run_folder: Path, rank: int) -> None:
    """Remove the folder of the node whose first rank this one is: the run is complete."""
    folder = cache_folder(run_folder, rank)
    if folder is not None and os.environ.get(INDUCTOR) == str(folder):
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # of other ranks, or gone
            folder.parent.rmdir()


def cache_folder(run_folder: Path, rank: int) -> Path | None:
    """``$XDG_CACHE_HOME/pervit/compile/HASH_OF_RUN_FOLDER/rank-00000``, by default below ``~/.cache``; None without a home directory."""
    run = hashlib.sha256(os.fsencode(run_folder.resolve())).hexdigest()[:_NAME_DIGITS]
    cache = user_cache()
    return cache and cache / "compile" / run / f"rank-{rank:05d}"


def _chosen(variable: str) -> str:
    """The variable's value, unless it is the default in /tmp that PyTorch sets when it is imported."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    value = os.environ.get(variable, "")
    return "" if Path(value).is_relative_to(default_cache_dir()) else value


def _is_usable(folder: Path) -> bool:
    """Create the folder; whether it can be written and locked, is this user's, and nobody else may write to it."""
    if make_private(folder):
        with suppress(OSError), open(folder / "lock", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Inductor locks files; some network file systems cannot
            return True
    return False
