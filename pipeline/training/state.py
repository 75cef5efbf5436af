"""Hold a run between its start and its end: everything that the training loop works with."""

import signal
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.manifest import RunState
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.errors import UserError, first_line
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Loader
from pipeline.loader.trial import SizedLoader
from pipeline.logs.profiling import StepProfiler
from pipeline.logs.run_files import RunEvents, SampleLog
from pipeline.logs.run_log import RunLog
from pipeline.metrics import Metric
from pipeline.runs.state import is_complete
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet
from pipeline.step.train_step import StepResult, TrainState
from pipeline.stores.store import StoreAway, StoreFails
from pipeline.stream.schedule import Schedule
from pipeline.training.compiling import Compilation
from pipeline.training.folder import RunLock, config_hash

_LONGEST_REASON = 2000  # characters of an error that events.jsonl keeps


@dataclass
class Run(AbstractContextManager["Run"]):
    """A run that was started; a context manager. The last four fields change as it goes on, and are what a checkpoint keeps of it."""

    config: Config
    world: World
    stop: StopSignal
    heartbeat: Heartbeat
    lock: RunLock | None  # held by rank 0
    schedule: Schedule
    train_set: ShardSet | MixedSet
    train_state: TrainState
    compilation: Compilation
    loader: SizedLoader
    val_loader: Loader[EvalBatches]
    agreement: Agreement
    saver: Saver
    mirror: Mirror | None  # where the run is in a store
    log: RunLog
    events: RunEvents
    samples: SampleLog | None
    profiler: StepProfiler

    first_step: int  # done before this start
    unsettled: tuple[int, StepResult, dict[str, Metric]] | None  # a step, of which is not known yet whether it was taken

    step: int  # done
    skipped_steps: int
    best: dict[str, Any] | None
    evaluation_due: bool

    @property
    def folder(self) -> Path:
        return self.config.folder

    def exchange_status(self) -> bool:
        """Exchange status with all ranks, once per step or evaluation batch; publish a checkpoint that all have written. Collective.
        Returns whether all stop: some rank has received a signal, or has a :attr:`failure`."""
        stop = self.stop.received != 0 or self.failure is not None
        agreed = self.agreement.exchange(stop, self.saver.failed, self.saver.written, self.mirror.sent if self.mirror else 0)
        self.saver.settle(agreed)
        if self.mirror:
            self.mirror.settle(agreed.sent)
        return agreed.stop != 0

    @property
    def failure(self) -> UserError | None:
        """What this rank's loader failed with ahead of time, or why the run may not write to its store any more."""
        return self.loader.failure or (self.mirror.failure if self.mirror else None)

    def raise_failure(self) -> None:
        """Raise, on all ranks, a rank's :attr:`failure`, if one has any. Collective."""
        failure = self.failure
        found = [said for said in self.world.gather([failure.exit_code, str(failure)] if failure else None) if said]
        if found:
            code, sentence = max(found)
            raise (StoreAway if code == StoreAway.exit_code else StoreFails)(sentence)

    def state(self) -> RunState:
        """What a checkpoint of this moment says."""
        return RunState(
            step=self.step,
            samples=self.schedule.samples(self.step),
            skipped_steps=self.skipped_steps,
            config=self.config.with_values({"data.decode": self.loader.decode}).model_dump(mode="json"),
            config_hash=config_hash(self.config),
            classes=self.train_set.classes,
            class_names=self.train_set.named,
            data=self.train_set.identity(),
            world_size=self.world.size,
            zero_stage=int(self.train_state.engine.zero_optimization_stage()),
            last_step=self.schedule.last_step,
            bad_samples={str(sample): sentence for sample, sentence in self.log.bad_samples.items()},
            best=self.best,
            evaluation_due=self.evaluation_due,
        )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop threads and close files. After an error the lock stays with the process, whose threads may still be writing."""
        whole = error is None and is_complete(self.step, self.evaluation_due, self.schedule.last_step)
        self.events.add("end", self.step, reason=self._why_it_ends(error, whole), whole=whole)
        with ExitStack() as parts:
            if error is not None:
                parts.enter_context(suppress(Exception))  # another one would hide the error that matters
            elif self.lock:
                parts.callback(self.lock.release)
            if self.mirror:  # after all that writes files
                parts.callback(self.mirror.close, *([self.config.checkpoint.retry_seconds] if error is None else []))
            parts.callback(setattr, self.train_state, "captured", None)  # NCCL's groups cannot end before
            parts.callback(self.profiler.close if error is None else self.profiler.abandon)
            for part in (self.samples, self.log, self.val_loader, self.loader):
                if part:
                    parts.callback(part.close)

    def _why_it_ends(self, error: BaseException | None, whole: bool) -> str:
        if isinstance(error, KeyboardInterrupt):
            return "stopped by Ctrl-C"
        if error is not None:
            kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
            return kind + first_line(error)[:_LONGEST_REASON]
        if whole:
            return self.schedule.end
        received = self.stop.received
        return f"stopped by {signal.Signals(received).name if received else 'a signal to another rank'}"
