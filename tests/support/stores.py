"""Servers of shards on 127.0.0.1: moto's S3 and nginx."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
BUCKET = "bucket"

_NGINX_CONFIG = """
daemon off; master_process off; worker_processes 1; pid {work}/nginx.pid; error_log {work}/error.log;
events {{ worker_connections 512; }}
http {{
  access_log off; keepalive_requests 100000;
  client_body_temp_path {work}; proxy_temp_path {work}; fastcgi_temp_path {work}; uwsgi_temp_path {work}; scgi_temp_path {work};
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


@contextmanager
def nginx(root: Path, work: Path) -> Iterator[int]:
    """nginx over a folder, which answers requests for byte ranges; gives its port."""
    if NGINX is None:
        pytest.skip("needs nginx (Debian: apt-get install nginx-light)")
    work.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config = work / "nginx.conf"
    config.write_text(_NGINX_CONFIG.format(work=work, port=port, root=root))
    server = subprocess.Popen([NGINX, "-e", work / "error.log", "-p", work, "-c", config], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield port
    finally:
        server.terminate()
        server.wait(10)


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """moto's S3 with an empty bucket, and the environment that leads to it; gives its port."""
    server_of = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer
    boto3 = pytest.importorskip("boto3", reason="needs boto3")
    server = server_of(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        for key, value in aws_environment(port).items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield port
    finally:
        server.stop()


def aws_environment(port: int) -> dict[str, str]:
    """Variables that lead AWS's clients to a server on this machine."""
    return {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


def upload(folder: Path, prefix: str) -> None:
    """Put the files of a folder into the bucket."""
    import boto3

    client = boto3.client("s3")
    for path in folder.iterdir():
        if path.is_file():
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def wait_for(port: int, tries: int = 500) -> None:
    """Wait until something listens on a port."""
    for _ in range(tries):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nothing listens on port {port}")
