"""Runs whose ``output_dir`` is in a store: killed while they upload, on an empty disk, on two nodes, beside another start."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.checkpoint.bucket import RunStore, fetched, part_key, steps_in
from pipeline.checkpoint.folder import saved_steps, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, find_damage
from pipeline.stores.place import RemotePath
from support.http_proxy import Fault, HttpProxy, Request
from support.ranks import Job, run_forked
from support.runs import evaluation_rows, step_rows
from support.small_run import SMALL_MODEL
from support.stores import BUCKET, aws_environment, s3_server

pytestmark = pytest.mark.multiprocess

TRAIN = (*SMALL_MODEL, "checkpoint.every_steps=4", "train.max_steps=12", "log.samples=true")
EXPORT = ("--format", "safetensors", "--output", "none.safetensors")
MEASURED = ("time", "images_per_second", "data_wait", "memory_gib", "peak_memory_gib", "upload_backlog_mib", "grad_sync")


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A place of this test alone: moto's server keeps what an earlier one has had."""
    return f"s3://{BUCKET}/{tmp_path.name}"


def environment(port: int, runs: Path) -> dict[str, str]:
    return {**aws_environment(port), "PERVIT_RUNS": str(runs)}


def rows_without_times(run: Path) -> list[dict]:
    rows = step_rows(run) + evaluation_rows(run)
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def parts(run: Path, step: int) -> list[tuple[str, str]]:
    """Name and checksum of each file of a checkpoint, all of which are as they were written."""
    manifest = CheckpointManifest.read(step_folder(run, step))
    assert not find_damage(step_folder(run, step), manifest.files)
    return [(file.name, file.xxh3) for file in manifest.files]


def test_killed_in_an_upload_and_continued_on_an_empty_disk(
    small_run: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a checkpoint that is seen before its parts are there, and against a machine that goes on with other weights,
    moments or metrics than those of a run that nobody has killed."""
    stuck = True

    def fault(request: Request) -> Fault | None:
        return Fault(delay=600) if stuck and request.method == "PUT" and "step-00000008/part" in request.path else None

    local = tmp_path / "local"
    run_forked("pipeline.train", "--config", small_run, *TRAIN, f"output_dir={local}")
    with s3_server(monkeypatch) as port, HttpProxy(port, 0, fault) as proxy:
        runs = tmp_path / "runs"
        options = ("--config", small_run, *TRAIN, f"output_dir={url}")
        job = Job(1, *options, module="support.bucket_train", **environment(proxy.port, runs))
        assert job.until(lambda: any("step-00000008/part" in request.path for request in proxy.requests)), job.outputs()
        job.kill()
        assert not job.wait_after_kill() or job.codes == [-9]
        store = RunStore(RemotePath(url))
        assert steps_in(store.store.objects()) == [4]
        folder = runs / BUCKET / tmp_path.name
        shutil.rmtree(runs)
        stuck = False
        done = run_forked("support.bucket_train", *options, **environment(proxy.port, runs))
        assert f"resuming {folder} from step 4" in done.stdout
        assert parts(folder, 12) == parts(local, 12) and saved_steps(folder) == saved_steps(local) == [8, 12]
        assert rows_without_times(folder) == rows_without_times(local)

        listing = store.store.objects()
        assert steps_in(listing) == [8, 12]
        for step in (8, 12):
            records = store.manifest(step).files
            assert {part_key(step, record) for record in records} == {
                name for name in listing if name.startswith(f"checkpoints/step-{step:08d}/part")
            }
        files = {path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")}
        names = {path.relative_to(folder).as_posix() for path in files if "checkpoints" not in path.parts}
        assert names | {".lock"} == {name for name in listing if not name.startswith("checkpoints/")}
        assert all(bytes(store.store.fetch(name).data) == (folder / name).read_bytes() for name in names)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        copy = fetched(url)
        assert parts(copy, 12) == parts(local, 12)
        shutil.rmtree(copy)
        commands = {**environment(proxy.port, runs), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        data = ("--data", yaml.safe_load(small_run.read_text())["data"]["path"], "--json", tmp_path / "result.json")
        run_forked("pipeline.evaluate", url, *data, "--step", "12", "--weights", "ema", **commands)
        assert json.loads((tmp_path / "result.json").read_text())["top1"] == evaluation_rows(folder)[-1]["top1"]
        assert "finished at step 12" in run_forked("pipeline.watch", url, "--once", **commands).stdout
        run_forked("pipeline.report", url, "--output", tmp_path / "page.html", **commands)
        assert "finished at step 12" in (tmp_path / "page.html").read_text()
        missing = run_forked("pipeline.export", f"{url}/checkpoints/step-00000004", *EXPORT, check=False, **commands)
        assert missing.stderr.startswith(f"error: {url} has no checkpoint of step 4, but of [8, 12]: ")
        again = run_forked("support.bucket_train", *options, **environment(proxy.port, runs))
        assert "is complete at step 12: nothing to train" in again.stdout


def test_two_nodes_upload_their_own_parts(small_run: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a manifest before another node's parts, and against nodes whose disks fill up or lack what a resume reads."""
    late, early = [True], []

    def fault(request: Request) -> Fault | None:
        if request.method == "PUT" and "step-00000004/checkpoint.json" in request.path and late[0]:
            early.append(request.path)
        if request.method == "PUT" and "step-00000004/part-00001" in request.path and late[0]:
            late[0] = False
            return Fault(delay=1, status=503)
        return None

    with s3_server(monkeypatch) as port, HttpProxy(port, 0, fault) as proxy:
        nodes = [tmp_path / "a", tmp_path / "b"]
        both = {**aws_environment(proxy.port), "PERVIT_RUNS": [str(node) for node in nodes]}
        options = ("--config", small_run, *TRAIN, f"output_dir={url}")
        run_forked("support.bucket_train", *options, "train.max_steps=8", processes=2, **both)
        store = RunStore(RemotePath(url))
        listing = store.store.objects()
        assert not early and not late[0] and steps_in(listing) == [4, 8]
        assert len(store.manifest(8).files) == 2 and {"samples/rank-00000.jsonl", "samples/rank-00001.jsonl"} <= listing.keys()
        for node in nodes:
            assert not [path for path in (node / BUCKET / tmp_path.name).rglob("*.safetensors")]
        shutil.rmtree(nodes[0])
        done = run_forked("support.bucket_train", *options, processes=2, **both)
        assert "from step 8" in done.stdout
        assert all(saved_steps(node / BUCKET / tmp_path.name) == [8] for node in nodes)
        alone = run_forked("support.bucket_train", *options, "train.max_steps=14", **environment(proxy.port, tmp_path / "c"))
        assert "from step 12" in alone.stdout and {12, 14} <= {*steps_in(store.store.objects())}
        assert [row["step"] for row in step_rows(tmp_path / "c" / BUCKET / tmp_path.name)] == list(range(1, 15))


def test_a_second_start_is_refused_and_a_signal_drains_the_backlog(
    small_run: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against two machines that write one run, and against a stop that leaves the newest checkpoint behind."""
    with s3_server(monkeypatch) as port, HttpProxy(port, 0) as proxy:
        options = ("--config", small_run, *TRAIN, "train.max_steps=100000", "checkpoint.every_steps=null", f"output_dir={url}")
        job = Job(1, *options, module="support.bucket_train", **environment(proxy.port, tmp_path / "a"))
        assert job.until(lambda: (tmp_path / "a" / BUCKET / tmp_path.name / "metrics.jsonl").exists()), job.outputs()
        second = run_forked("support.bucket_train", *options, check=False, **environment(proxy.port, tmp_path / "b"))
        assert second.returncode == 2
        assert second.stderr.count(f"error: {url} is being trained by process {job.pids[0]} on ") == 1
        assert "Traceback" not in second.stderr
        proxy.delay = 0.2
        job.signal(signal.SIGTERM)
        assert job.wait() == [75], job.outputs()
        store = RunStore(RemotePath(url))
        (step,) = steps_in(store.store.objects())
        rows = [json.loads(line) for line in bytes(store.store.fetch("metrics.jsonl").data).splitlines()]
        assert step == rows[-1]["step"] > 0 and "upload_backlog_mib" in rows[-1]
        events = [json.loads(line) for line in bytes(store.store.fetch("events.jsonl").data).splitlines()]
        assert events[-1]["event"] == "end" and bytes(store.store.fetch(".lock").data) == b"null\n"


@pytest.mark.parametrize("status, words", [(403, "refuses access (the answer was 403)"), (0, "nowhere does not exist")])
def test_a_store_that_refuses_is_one_sentence_before_pytorch(
    small_run: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, status: int, words: str
) -> None:
    """Guards against a start that finds out after a minute of loading that it may not write."""
    with s3_server(monkeypatch) as port, HttpProxy(port, 0, lambda request: Fault(status=status) if status else None) as proxy:
        url = url if status else "s3://nowhere/run"
        done = run_forked(
            "pipeline.train", "--config", small_run, f"output_dir={url}", check=False, **environment(proxy.port, tmp_path)
        )
    assert done.returncode == 2 and done.stderr.startswith(f"error: output_dir {url} ") and words in done.stderr
    assert done.stderr.count("\n") == 1 and "loading" not in done.stdout and not (tmp_path / BUCKET).exists()


def test_a_folder_of_another_run_is_not_mixed_with_that_in_the_store(
    small_run: Path, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a machine with an old folder of the same name, whose files would replace those of the run in the store."""
    with s3_server(monkeypatch) as port:
        options = ("--config", small_run, *TRAIN, "train.max_steps=2", f"output_dir={url}")
        run_forked("support.bucket_train", *options, **environment(port, tmp_path / "a"))
        store, folder = RunStore(RemotePath(url)), tmp_path / "a" / BUCKET / tmp_path.name
        before = dict(store.store.objects())
        starts = json.loads((folder / "environment.json").read_text())
        (folder / "environment.json").write_text(json.dumps([{**starts[0], "started": "2020-01-01T00:00:00+0000"}]))
        done = run_forked("support.bucket_train", *options, check=False, **environment(port, tmp_path / "a"))
        assert done.returncode == 2 and "are of two runs: move the folder away" in done.stderr
        after = store.store.objects()
        assert {name: about for name, about in after.items() if name != ".lock"} == {
            name: about for name, about in before.items() if name != ".lock"
        }
