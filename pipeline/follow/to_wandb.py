"""To Weights & Biases: each row is a row of the run's history, whose number there (``_step``) is its number in the segment.

So the client's own order is kept, and the number of the next row tells what has arrived: the server's where it is online, that of the
files (``wandb_file.py``) where it is offline. The charts' axis is ``step``, the optimizer step. ``WANDB_MODE``, ``WANDB_DIR``,
``WANDB_API_KEY``, ``WANDB_BASE_URL``, ``WANDB_ENTITY`` and so on are the client's, as always.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.follow.tracker import About, Item, Picture, Segment
from pipeline.follow.wandb_file import history

_LINK, _PLACE = "offline-run-*-{id}/run-{id}.wandb", "wandb"


class Wandb:
    """Weights & Biases.

    Args:
        project: None: ``WANDB_PROJECT``, or ``pervit``.
    """

    def __init__(self, project: str | None) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None
        self._project = project or os.environ.get("WANDB_PROJECT") or "pervit"
        try:
            settings = wandb.setup().settings  # with the variables' and the settings file's
        except Exception as error:  # pydantic's, of several kinds
            raise UserError(
                f"Weights & Biases refuses a setting ({_first_mistake(error)})",
                "correct the WANDB_ variables and wandb/settings; WANDB_MODE is online or offline",
            ) from None
        self._mode = settings.mode
        entity = f"{settings.entity}/" if settings.entity else ""
        where = "offline" if self._offline else settings.base_url
        self.target = f"Weights & Biases ({where}, {entity}{self._project})"
        self._root = os.path.abspath(settings.root_dir)

    @property
    def _offline(self) -> bool:
        return self._mode in ("offline", "dryrun")

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
                group=f"{about.name} {segment.id.partition('-')[0]}",
                dir=root,
                mode="offline" if self._offline else "online",
                resume="allow",
                config=_config(segment, about),
                allow_val_change=True,
                settings=settings,
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            remedy = "run `wandb login`, set WANDB_API_KEY, or write to this machine with WANDB_MODE=offline"
            if "project name" in reason:
                remedy = "choose another name with --project or WANDB_PROJECT"
            raise UserError(f"{self.target} refuses ({reason})", remedy) from None
        run.define_metric("*", step_metric="step")
        segment.place = root
        if self._offline:
            return sent if kept is None else min(kept, sent)
        return min(run.starting_step, sent)

    def send(self, first: int, items: Sequence[Item]) -> None:
        for number, item in enumerate(items, first):
            values: dict[str, Any] = {"step": item.step, "_timestamp": item.time}
            values.update({item.name: self._image(item)} if isinstance(item, Picture) else item.values)
            self._run.log(values, step=number, commit=True)

    def describe(self, about: About) -> None:
        self._run.config.update({**about.config, "start": about.start}, allow_val_change=True)

    def close(self, state: str) -> None:
        run, self._run = self._run, None
        if state == "lost":
            with suppress(Exception):
                self._wandb.teardown(exit_code=1)  # its service may have died with the connection
            return
        if state == "superseded":
            run.tags = (*(run.tags or ()), "superseded")
        run.finish(exit_code=0)

    def _image(self, item: Picture) -> Any:
        from PIL import Image

        return self._wandb.Image(Image.open(io.BytesIO(item.png)))


def _config(segment: Segment, about: About) -> dict[str, Any]:
    earlier = {"rewinds": segment.number - 1} if segment.number > 1 else {}
    return {**about.config, "start": about.start, **earlier}


def _kept_offline(root: Path, id: str) -> int | None:
    """The number behind the last row in the offline files of a run; None if there are none."""
    files = sorted((root / _PLACE).glob(_LINK.format(id=id)))
    last = -1
    for path in files:
        with suppress(OSError, ValueError):
            for row in history(path):
                last = max(last, int(row["_step"]))
    return last + 1 if files else None


def _first_mistake(error: Exception) -> str:
    """What the client says of a setting, in one line."""
    mistakes: list[dict[str, Any]] = getattr(error, "errors", list)()
    if mistakes:  # pydantic's
        where = ".".join(str(part) for part in mistakes[0].get("loc", ()))
        return f"{where}: {mistakes[0].get('msg', '')}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
