"""Trackers whose server fails, or answers nonsense: each failure is named, and the next attempt has nothing of the last one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.errors import install_extra
from support.growing_run import GrowingRun, client_environment
from support.launching import PATIENCE

ANSWERS = {  # status, type, content
    "a page": (200, "text/html", "<html>Please log in</html>"),
    "an empty object": (200, "application/json", "{}"),
    "a list": (200, "application/json", "[1, 2]"),
    "an error": (500, "text/plain", "oops"),
}


@contextmanager
def server(status: int, kind: str, content: str) -> Iterator[str]:
    """A server with the same answer for everything; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content.encode())

        do_GET = do_POST = do_PUT = do_PATCH = do_HEAD = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as opened:
        opened.daemon_threads = True
        threading.Thread(target=opened.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{opened.server_port}"
        finally:
            opened.shutdown()


def environment(folder: Path, url: str) -> dict[str, str]:
    """The clients reach nothing but this server."""
    return client_environment(
        folder,
        WANDB_MODE="online",
        WANDB_BASE_URL=url,
        WANDB_API_KEY="0" * 40,
        WANDB_ERROR_REPORTING="false",
        WANDB_INIT_TIMEOUT="10",
        MLFLOW_TRACKING_URI=url,
        TRACKIO_SERVER_URL=url,
        TRACKIO_WRITE_TOKEN="0",
    )


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
@pytest.mark.parametrize(
    "answer", [pytest.param(name, marks=pytest.mark.long) if name != "a page" else name for name in ANSWERS]
)
def test_a_server_that_lies(answer: str, tracker: str, tmp_path: Path) -> None:
    """Guards against a traceback, rows that are noted as sent although nobody has them, and an attempt that can never succeed again:
    Weights & Biases's client says "run ID ... is in use" after a first one that failed."""
    pytest.importorskip(tracker, reason=install_extra(tracker))
    run = GrowingRun(tmp_path / "run")
    run.start()
    run.train(12)
    with server(*ANSWERS[answer]) as url:
        command = [sys.executable, "-m", "pipeline.track", run.folder, "--to", tracker, "--once", "--every", "0.1"]
        variables = environment(tmp_path, url)
        ended = subprocess.run(
            list(map(str, command)),
            cwd=tmp_path,
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
        )
    said = ended.stderr.splitlines()
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert said[-1].startswith("error: ") and f"{url}, pervit) " in said[-1] and "in use" not in ended.stderr
    if (tracker, answer) == ("wandb", "an empty object"):  # which ends the client's own process, behind which rows are lost
        assert "may lack what was sent last (" in said[-1] and "the same command asks what has arrived" in said[-1], (
            ended.stderr
        )
        return
    *attempts, _ = [line for line in said if f"{url}, pervit)" in line and " to " not in line.partition("(")[0]]
    assert len(attempts) == 2 and all("; the next attempt is in 0." in line for line in attempts), ended.stderr
    assert "could not be reached (" in said[-1] and said[-1].endswith(
        "): the same command continues with what is left to send."
    )
    notes = [json.loads(file.read_text()) for file in (tmp_path / "state" / "pervit-track").glob("*.json")]
    assert [note["sent"] for note in notes] == [[]]
