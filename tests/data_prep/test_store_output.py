"""Sharding straight into a store: whole files, the manifest last, and the same bytes as in a folder, whatever dies meanwhile."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from data_prep import shard_imagenet
from data_prep.sources import ImageFolder
from data_prep.store_output import StoreOutput
from data_prep.upload_shards import upload
from data_prep.writer import Share, write_shards
from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import RemotePath
from support.http_proxy import Fault, HttpProxy, Request
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.sharding import SHARDER, digests
from support.stores import BUCKET, aws_environment, s3_server

URL, ARRAY, REFUSED = (f"s3://{BUCKET}/{prefix}" for prefix in ("sharded", "array", "refused"))


def in_bucket(prefix: str) -> dict[str, bytes]:
    import boto3

    client = boto3.client("s3")
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
    return {
        each["Key"].removeprefix(f"{prefix}/"): client.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read()
        for each in found
    }


def test_a_killed_run_goes_on_and_gives_what_a_folder_would_hold(
    digits_images: Path, digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against half a set that can be read, hours of uploads done again, and a scratch folder that fills the disk."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    on_disk: list[int] = []
    held: list[str] = []
    killed = False

    def watch(request: Request) -> Fault | None:
        held.extend([request.path] if "train-000002.tar" in request.path else [])
        on_disk.append(len(list(scratch.glob("*/*.tar")) + list(scratch.glob("*/.*.tar.*.tmp"))))
        return Fault(delay=PATIENCE) if not killed and "train-000002.tar" in request.path else None

    arguments = ["--source", digits_images, "--output", URL, "--scratch", scratch, "--samples-per-shard", 400, "--workers", 2]
    with s3_server(monkeypatch) as port, HttpProxy(port, 0, watch) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        environment = clean_environment(**aws_environment(proxy.port))
        process = subprocess.Popen([sys.executable, SHARDER, *map(str, arguments)], cwd=REPOSITORY, env=environment)
        deadline = time.monotonic() + PATIENCE
        while not all(_was_put(proxy, f".train-{number:06d}.finished.npz") for number in (0, 1, 3)) or not held:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(UserError, match="manifest.json is missing"):
            ShardSet(URL, "train")
        assert any(scratch.rglob("*.tar"))

        killed, before = True, len(proxy.requests)
        with pytest.raises(UserError, match=r"unfinished train set of another run \(seed must be 7, got 0\)"):
            _shard(monkeypatch, *arguments, "--seed", 7)
        _shard(monkeypatch, *arguments)
        written = [request.path for request in proxy.requests[before:] if request.method == "PUT"]
        again = {Path(path.partition("?")[0]).name for path in written if "/train-" in path}
        assert again == {"train-000002.tar", "train-000002.idx", "train-samples.npy"}
        assert written[-1].endswith("/manifest.json")
        found = {name: hashlib.sha256(data).hexdigest() for name, data in in_bucket("sharded").items()}
        assert found == {name: digest for name, digest in digests(digits_shards).items() if name != ".lock"}
        assert max(on_disk) == 2 and not list(scratch.iterdir())
        written = len([request for request in proxy.requests if request.method == "PUT"])
        _shard(monkeypatch, *arguments)
        assert len([request for request in proxy.requests if request.method == "PUT"]) == written


def test_tasks_of_an_array_and_two_splits_at_once(
    digits_images: Path, digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a split that vanishes from the manifest because another job wrote it in between, and against unjoined shards."""
    with s3_server(monkeypatch) as port:

        def write(split: str, task: int = 0, tasks: int = 1, seed: int = 0) -> int:
            """Write a part; the number of samples that the manifest then lists."""
            with StoreOutput(RemotePath(ARRAY), tmp_path, f"{split} {task} {tasks}") as output:
                source, share = ImageFolder(digits_images, split), Share(task, tasks)
                info = write_shards(source, output, split, 400, seed=seed, share=share)
                return info.samples if info else 0

        def come_between(request: Request) -> None:
            """Another job writes the val split when this one has read the manifest and is about to write it."""
            if request.method == "PUT" and request.path.endswith("/manifest.json") and not done:
                monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
                done.append(write("val"))

        done: list[int] = []
        assert write("train", task=1, tasks=2) == 0
        assert "manifest.json" not in in_bucket("array")
        with pytest.raises(UserError, match="unfinished train set of another run"):
            write("train", task=0, tasks=2, seed=1)
        with pytest.raises(UserError, match=r"array/\.train-in-progress says that a set is being written there by the sharder"):
            upload(digits_shards, ARRAY)
        with HttpProxy(port, 0, come_between) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
            assert write("train", task=0, tasks=2) == 1438
        assert done == [359]
        found = {name: hashlib.sha256(data).hexdigest() for name, data in in_bucket("array").items()}
        assert found == {name: digest for name, digest in digests(digits_shards).items() if name != ".lock"}


def test_an_output_that_cannot_be_written_is_one_sentence(
    digits_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback, and against two processes of a machine that remove each other's tars."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = ["--source", digits_images, "--output"]
    with pytest.raises(
        UserError,
        match=r"--output must be s3://BUCKET/PREFIX, gs:// or az://, got https://host/x \(a web server can only be read\)",
    ):
        _shard(monkeypatch, *source, "https://host/x")
    with pytest.raises(UserError, match=r"--scratch requires an --output in a store, got the folder \S+"):
        _shard(monkeypatch, *source, tmp_path / "shards", "--scratch", tmp_path)
    with pytest.raises(
        UserError, match=r"--scratch must be an existing, writable folder, got \S+absent \(No such file or directory\)"
    ):
        _shard(monkeypatch, *source, REFUSED, "--scratch", tmp_path / "absent")
    with s3_server(monkeypatch) as port:
        holder = (
            "import sys\nfrom pathlib import Path\nfrom data_prep.store_output import StoreOutput\n"
            "from pipeline.stores.place import RemotePath\n"
            "with StoreOutput(RemotePath(sys.argv[1]), Path(sys.argv[2]), 'None 0 1'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", holder, REFUSED, str(tmp_path)]
        environment = clean_environment(PYTHONPATH=str(REPOSITORY), **aws_environment(port))
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "held\n"
            with pytest.raises(UserError, match="is being written by another process of this machine"):
                _shard(monkeypatch, *source, REFUSED)
            assert process.stdin
            process.stdin.close()
        with pytest.raises(UserError, match="s3://nowhere/x cannot be opened: nowhere does not exist: create it"):
            _shard(monkeypatch, *source, "s3://nowhere/x")
        with HttpProxy(port, 0, lambda request: Fault(status=403) if request.method == "PUT" else None) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
            with pytest.raises(
                UserError, match=r"refuses access .* so that \S+-in-progress cannot be written: check the store"
            ):
                _shard(monkeypatch, *source, REFUSED)
    assert not list(tmp_path.glob("pervit-shards-*"))


def _shard(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["shard_imagenet", *map(str, arguments)])
    monkeypatch.setattr("data_prep.workers.stop_like_ctrl_c", lambda: None)  # pytest has handlers of its own
    shard_imagenet.main()


def _was_put(proxy: HttpProxy, name: str) -> bool:
    return any(request.method == "PUT" and request.path.endswith(f"/{name}") for request in proxy.requests)
