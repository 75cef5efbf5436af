"""Collect rows of a result on each rank in a hidden file, and put them together on rank 0 in the order of an evaluation's batches.

Memory does not grow with the number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pipeline.errors import UserError
from pipeline.files import disk_reason, remove_leftovers

if TYPE_CHECKING:
    from pipeline.cluster.world import World
    from pipeline.loader.batches import EvalBatches

_ROWS_AT_ONCE = 16384  # in memory


class RankRows:
    """Rows of one pass. A context manager, which removes this rank's hidden files. Construction is collective.

    Args:
        path: of the result: the hidden files are beside it, in a folder that all ranks see.
        dtype: of a row; the field ``valid`` marks those that count.

    Raises:
        UserError: on every rank: the hidden files cannot be created.
    """

    def __init__(self, path: Path, dtype: np.dtype, batches: EvalBatches, world: World) -> None:
        from pipeline.cluster.agreement import raise_on_all

        self._path, self.dtype, self._batches, self._world = path, dtype, batches, world
        if world.is_main:
            remove_leftovers(path)
        self._token = world.from_main(token_hex(4))  # apart from those of another pass into the same file
        self._failure: UserError | None = None
        self._files: list[BinaryIO] = []
        try:
            self._files = [open(self._part(kind, world.rank), "xb") for kind in ("rows", "errors")]
        except OSError as error:
            self._failure = write_refusal(self._path, error)
        raise_on_all(self._failure, world)

    def add(self, rows: np.ndarray, errors: Mapping[int, str] = MappingProxyType({})) -> None:
        """Add a batch. Args: rows: (batch_size,) of the dtype, padding included; errors: index of an image -> why it has no result."""
        if self._failure:
            return
        try:
            self._files[0].write(rows.tobytes())
            for index in sorted(errors):
                self._files[1].write(json.dumps([index, errors[index]]).encode() + b"\n")
        except OSError as error:  # said when all ranks are done: the others are in a collective
            self._failure = write_refusal(self._path, error)

    def publish(self, write: Callable[[Iterator[tuple[np.ndarray, list[str]]]], object]) -> None:
        """End the pass, and let rank 0 write what all ranks have added. Collective.

        Args:
            write: gets valid rows in their order, some at a time, each with its error or ""; at least once, with no row perhaps.

        Raises:
            UserError: on every rank: some rank could not write.
        """
        from pipeline.cluster.agreement import do_in_main, raise_on_all

        try:
            for file in self._files:
                file.close()
        except OSError as error:
            self._failure = self._failure or write_refusal(self._path, error)
        raise_on_all(self._failure, self._world)

        def publish() -> None:
            try:
                write(self._merged())
            except OSError as error:
                raise write_refusal(self._path, error) from None

        do_in_main(publish, self._world)

    def _merged(self) -> Iterator[tuple[np.ndarray, list[str]]]:
        with ExitStack() as stack:
            opened = [
                [stack.enter_context(open(self._part(kind, rank), "rb")) for kind in ("rows", "errors")]
                for rank in range(self._world.size)
            ]
            waiting = [_next_error(errors) for _, errors in opened]
            held: list[np.ndarray] = []
            said: list[str] = []
            for _ in range(len(self._batches)):
                for rank, (part, errors) in enumerate(opened):
                    rows = np.fromfile(part, self.dtype, self._batches.batch_size)
                    rows = rows[rows["valid"]]
                    held.append(rows)
                    for index in rows["index"].tolist():
                        if index != waiting[rank][0]:
                            said.append("")
                            continue
                        said.append(waiting[rank][1])
                        waiting[rank] = _next_error(errors)
                if len(said) >= _ROWS_AT_ONCE:
                    yield np.concatenate(held), said
                    held, said = [], []
            yield np.concatenate([np.empty(0, self.dtype), *held]), said

    def __enter__(self) -> RankRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove this rank's hidden files."""
        for kind, file in zip(("rows", "errors"), self._files):
            with suppress(OSError):
                file.close()
            self._part(kind, self._world.rank).unlink(missing_ok=True)

    def _part(self, kind: str, rank: int) -> Path:
        return self._path.with_name(f".{self._path.name}.{self._token}-{kind}-{rank:05d}.tmp")


def write_refusal(path: Path, error: OSError) -> UserError:
    """The sentence for a result, or a hidden file beside it, that cannot be written or read."""
    return UserError(
        f"{error.filename or path} cannot be written or read ({disk_reason(path, error)})",
        "pass a file in a folder that all processes share and can write, with enough space",
    )


def _next_error(file: BinaryIO) -> tuple[int, str]:
    line = file.readline()
    index, reason = json.loads(line) if line else (-1, "")  # no image has this number
    return index, reason
