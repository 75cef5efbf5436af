"""A local HTTP server that answers as the Hugging Face hub does, and records what is asked of it."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """A hub with one user, ``someone``. ``with FakeHub() as hub``: ``hub.endpoint`` is for ``HF_ENDPOINT``.

    Args:
        refuse: path's part -> (status, message): requests that are refused.

    Attributes:
        requests: (method, path, token) of each request, in order.
        repositories: name -> file -> content, as committed.
        commits: the header of each commit.
    """

    def __init__(self, refuse: dict[str, tuple[int, str]] | None = None) -> None:
        self.refuse = refuse or {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}  # large files by SHA-256, before their commit
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(iter(self._chunk, b""))
        path = self.path.partition("?")[0]
        token = self.headers.get("Authorization")
        self.hub.requests.append((self.command, path, token))
        for part, (status, message) in self.hub.refuse.items():
            if part in path:
                return self._answer(status, {"error": message})
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            self.hub.repositories.setdefault(f"someone/{name}", {})
            return self._answer(200, {"url": f"{self.hub.endpoint}/someone/{name}", "name": f"someone/{name}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": _mode(file["path"]), "shouldIgnore": False} for file in files]
            return self._answer(200, {"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            action = [{**each, "actions": {"upload": {"href": f"{self.hub.endpoint}/large/{each['oid']}"}}} for each in wanted]
            return self._answer(200, {"transfer": "basic", "objects": action})
        if path.startswith("/large/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/large/")
            self.hub.objects[path.removeprefix("/large/")] = body
            return self._answer(200, {})
        if "/commit/" in path:
            return self._commit(path.split("/api/models/")[1].rpartition("/commit/")[0], body)
        if "/resolve/" in path:
            return self._file(path)
        return self._answer(404, {"error": "not found"})

    def _chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def _commit(self, repo: str, body: bytes) -> None:
        files = self.hub.repositories[repo]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.commits.append(value)
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        self._answer(200, {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{'c' * 40}", "commitOid": "c" * 40})

    def _file(self, path: str) -> None:
        repo, _, rest = path[1:].partition("/resolve/")
        content = self.hub.repositories.get(repo, {}).get(rest.partition("/")[2])
        if content is None:
            return self._answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(content).hexdigest()
        self._answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": "c" * 40, "Accept-Ranges": "bytes"})

    def _answer(self, status: int, content: dict | bytes, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".onnx", ".pt2")) else "regular"
