"""Send to Trackio: each row is one of its rows, at its optimizer step.

After each call the number of rows that the store has is asked for. ``TRACKIO_DIR`` (local), ``TRACKIO_SERVER_URL`` and
``TRACKIO_WRITE_TOKEN`` (a server of one's own), ``TRACKIO_SPACE_ID`` and ``HF_TOKEN`` (a Hugging Face Space) are the client's, as always.
"""

import contextlib
import io
import os
import time
from collections.abc import Sequence
from typing import Any

from pipeline.errors import UserError, first_line
from pipeline.track.tracker import WHERE, About, Item, Picture, Segment

_PATIENCE = 60.0  # seconds for items to arrive


class Trackio:
    """Trackio; its variable is ``TRACKIO_PROJECT``."""

    def __init__(self, project: str | None) -> None:
        import trackio

        self._trackio = trackio
        self._run: Any = None
        self._project = project or os.environ.get("TRACKIO_PROJECT") or "pervit"
        self._remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        self.target = f"Trackio ({self._remote or trackio.utils.TRACKIO_DIR}, {self._project})"

    def open(self, segment: Segment, about: About, sent: int) -> int:
        from huggingface_hub.errors import LocalTokenNotFoundError

        try:
            with _quiet():
                self._run = self._trackio.init(
                    self._project,
                    name=f"{segment.title(about.name)} {segment.base}",
                    group=about.name,
                    config={**about.config, "start": about.start, "rewinds": segment.number - 1},
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,  # of this machine, which does not train
                    auto_log_cpu=False,
                )
        except (ValueError, LocalTokenNotFoundError) as error:
            remedy = "correct TRACKIO_SPACE_ID, TRACKIO_SERVER_URL or TRACKIO_WRITE_TOKEN, run `hf auth login`, or unset them"
            raise UserError(f"{self.target} refuses ({first_line(error)})", f"{remedy} to write to this machine") from None
        segment.place = self._run.id
        return min(self._arrived(), sent)

    def send(self, first: int, items: Sequence[Item]) -> None:
        with _quiet():
            for item in items:
                if isinstance(item, Picture):
                    self._run.log({item.name: self._trackio.Image(item.image())}, step=item.step)
                else:
                    self._run.log({**item.values, f"{WHERE}/unix_time": item.time}, step=item.step)
        deadline, wanted = time.monotonic() + _PATIENCE, first + len(items)
        while (arrived := self._arrived()) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{wanted - arrived} of {len(items)} rows have not arrived after {_PATIENCE:g} s")
            time.sleep(0.05)

    def describe(self, about: About) -> None:
        """Nothing: a config is sent with the first row."""

    def close(self, state: str) -> None:
        self._run = None
        with _quiet():
            self._trackio.finish()

    def _arrived(self) -> int:
        if not self._remote:
            from trackio.sqlite_storage import SQLiteStorage

            return SQLiteStorage.get_log_count(self._project, run_id=self._run.id)
        from trackio.remote_client import RemoteClient

        run = self._run
        source = run._space_id or run._server_base_url
        client = RemoteClient(source, hf_token=run._hf_token_for_remote(), write_token=run._write_token, verbose=False)
        return int(client.predict(api_name="/get_run_summary", project=self._project, run_id=run.id)["num_logs"])


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """The client prints notes of its own, which would stand among the command's lines."""
    return contextlib.redirect_stdout(io.StringIO())
