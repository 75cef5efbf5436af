"""Send to Weights & Biases: each row is a row of the run's history, whose number there (``_step``) is its number in the segment.

So the client's own order is kept, and the number of the next row tells what has arrived: the server's where it is online, that of the
files (:func:`history`) where it is offline. The charts' axis is ``step``, the optimizer step. ``WANDB_MODE``, ``WANDB_DIR``,
``WANDB_API_KEY``, ``WANDB_BASE_URL``, ``WANDB_ENTITY`` and so on are the client's, as always.
"""

import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, first_line
from pipeline.track.tracker import About, Item, Picture, Segment

_LINK, _PLACE = "offline-run-*-{id}/run-{id}.wandb", "wandb"
_FILE_HEADER, _CHUNK_HEADER, _BLOCK = 7, 7, 1 << 15  # bytes
_WHOLE, _LAST = 1, 4


class Wandb:
    """Weights & Biases; its variable is ``WANDB_PROJECT``."""

    def __init__(self, project: str | None) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None
        self._project = project or os.environ.get("WANDB_PROJECT") or "pervit"
        try:
            settings = wandb.setup().settings  # with the variables' and the settings file's
        except Exception as error:  # pydantic's, of several kinds
            remedy = "correct the WANDB_ variables and wandb/settings; WANDB_MODE is online or offline"
            why, mistakes = first_line(error)[:200], list[Any](getattr(error, "errors", list)())
            if mistakes:  # pydantic's
                why = f"{'.'.join(map(str, mistakes[0].get('loc', ())))}: {mistakes[0].get('msg', '')}"
            raise UserError(f"Weights & Biases refuses a setting ({why})", remedy) from None
        self._mode, self._offline = settings.mode, settings.mode in ("offline", "dryrun")
        entity = f"{settings.entity}/" if settings.entity else ""
        where = "offline" if self._offline else settings.base_url
        self.target = f"Weights & Biases ({where}, {entity}{self._project})"
        self._root = os.path.abspath(settings.root_dir)

    def open(self, segment: Segment, about: About, sent: int) -> int:
        wandb = self._wandb
        if self._mode == "disabled":
            raise UserError("WANDB_MODE is 'disabled', which sends nothing", "set it to online or offline, or unset it")
        root = segment.place or self._root
        os.makedirs(root, exist_ok=True)
        kept = _kept_offline(Path(root), segment.id) if self._offline else None
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            save_code=False,
            x_disable_machine_info=True,  # of this machine, which does not train
            x_disable_stats=True,
            silent=True,
        )
        try:
            self._run = run = wandb.init(
                project=self._project,
                id=segment.id,
                name=segment.title(about.name),
                group=f"{about.name} {segment.base}",
                dir=root,
                mode="offline" if self._offline else "online",
                resume="allow",
                config={**_config(about), **({"rewinds": segment.number - 1} if segment.number > 1 else {})},
                allow_val_change=True,
                settings=settings,
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = first_line(error)
            remedy = "run `wandb login`, set WANDB_API_KEY, or write to this machine with WANDB_MODE=offline"
            if "project name" in reason:
                remedy = "choose another name with --project or WANDB_PROJECT"
            raise UserError(f"{self.target} refuses ({reason})", remedy) from None
        except Exception:  # the next attempt would be told that the run is in use
            self.close("lost")
            raise
        run.define_metric("*", step_metric="step")
        segment.place = root
        arrived = kept if self._offline else run.starting_step
        return sent if arrived is None else min(arrived, sent)

    def send(self, first: int, items: Sequence[Item]) -> None:
        for number, item in enumerate(items, first):
            values: dict[str, Any] = {"step": item.step, "_timestamp": item.time}
            values.update({item.name: self._wandb.Image(item.image())} if isinstance(item, Picture) else item.values)
            self._run.log(values, step=number, commit=True)

    def describe(self, about: About) -> None:
        self._run.config.update(_config(about), allow_val_change=True)

    def close(self, state: str) -> None:
        run, self._run = self._run, None
        if state == "lost":
            with suppress(Exception):
                self._wandb.teardown(exit_code=1)  # its service may have died with the connection
            return
        if state == "superseded":
            run.tags = (*(run.tags or ()), "superseded")
        try:
            run.finish(exit_code=0)
        except Exception:  # of its service, which would have a traceback at the end of the process, too
            self.close("lost")
            raise


def _config(about: About) -> dict[str, Any]:
    return {**about.config, "start": about.start}


def _kept_offline(root: Path, id: str) -> int | None:
    """The number behind the last row in the offline files of a run; None if there are none."""
    files = sorted((root / _PLACE).glob(_LINK.format(id=id)))
    # The client names a run's folder by the second, and would overwrite what a sender that was killed has begun in this one.
    while any(time.strftime("-%Y%m%d_%H%M%S-") in str(path) for path in files):
        time.sleep(0.05)
    last = -1
    for path in files:
        with suppress(OSError, ValueError):
            for row in history(path):
                last = max(last, int(row["_step"]))
    return last + 1 if files else None


def history(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rows of an offline file, as far as it was written: name -> value, with ``_step``; names of parts are joined by a dot.

    The file is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB; in these, chunks of checksum (4 bytes), length (2)
    and type (1: whole, 2: first, 3: middle, 4: last part of a record). A record is a protocol buffer of the client's own. The
    client keeps up to a block in memory, so a kill costs the newest rows; they are sent again. Raises OSError, ValueError: it
    cannot be read, or not any further."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        try:
            record = Record.FromString(data)
        except DecodeError as error:
            raise ValueError(f"{path} is damaged ({error})") from None
        if record.WhichOneof("record_type") == "history":
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def _records(data: bytes) -> Iterator[bytes]:
    place, begun = _FILE_HEADER, b""
    while place + _CHUNK_HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _CHUNK_HEADER:
            place += left  # the rest of a block is empty where no header fits
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += _CHUNK_HEADER
        if kind == 0 or place + length > len(data):
            return  # not yet written
        begun += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield begun
            begun = b""
