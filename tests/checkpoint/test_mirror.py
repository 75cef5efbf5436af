"""A run's store follows its folder: through faults, behind a backlog, without what a newer save replaces."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.checkpoint import mirror as mirror_module
from pipeline.checkpoint.bucket import RunStore, fetched, steps_in
from pipeline.checkpoint.folder import saved_steps, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, find_damage
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.parts import slice_key
from pipeline.stores import lock as lock_module
from pipeline.stores import opening
from pipeline.stores import store as store_module
from pipeline.stores.lock import StoreLock
from pipeline.stores.place import RemotePath
from support.checkpoints import save
from support.http_proxy import Fault, HttpProxy, Request
from support.stores import BUCKET, s3_server

SOAK = os.environ.get("PERVIT_SOAK") == "1"
KINDS = (
    Fault(status=503),
    Fault(status=500),
    Fault(cut_after=0),  # a connection that is reset: of a write, after it was done
    Fault(cut_after=7),
    Fault(short_by=3),
    Fault(delay=0.6),  # longer than a client waits
    Fault(lose=5),  # an upload of which the end is lost
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and timeouts of milliseconds."""
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE", "_FIRST_THROTTLED", "_LONGEST_THROTTLED"):
        monkeypatch.setattr(store_module, name, 0.01)
    monkeypatch.setattr(mirror_module, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(mirror_module, "_EVERY", 0.02)
    monkeypatch.setattr(lock_module, "_POLL", 0.01)
    monkeypatch.setattr(opening, "_SILENT", timedelta(seconds=0.4))


def open_mirror(run: Path, place: RemotePath) -> Mirror:
    lock = StoreLock(place, ".lock", {"pid": 1}, "this")
    lock.take()
    mirror = Mirror(run, RunStore(place), lock, leads=True, apart=False)
    mirror.start()
    return mirror


def save_step(mirror: Mirror, run: Path, step: int, best: int | None = None, keep_last: int = 2) -> CheckpointManifest:
    """A checkpoint of a few kB and a row for it, handed to the mirror as a saver does."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step}, "loss": 1.0}}\n')
    folder = step_folder(run, step)
    weights = torch.full((500,), float(step))
    manifest = save(folder, [{slice_key("weight", "w", 0): weights}], {"w": [500]}, step)
    config = {**manifest.state.config, "checkpoint": {**manifest.state.config["checkpoint"], "keep_last": keep_last}}
    record = {"top1": 50.0, "step": best, "weights": "model"} if best else None
    manifest = replace(manifest, state=replace(manifest.state, config=config, best=record))
    (folder / "checkpoint.json").write_text(manifest.to_text())
    part = manifest.files[0]
    path = folder / part.name
    mirror.add(manifest, part, path, os.open(path, os.O_RDONLY))
    return manifest


def drain(mirror: Mirror) -> None:
    deadline = time.monotonic() + 600
    while mirror.busy:
        mirror.settle(mirror.sent)
        assert mirror.failure is None and time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "faults",
    [60, pytest.param(1000, marks=pytest.mark.skipif(not SOAK, reason="part of the soak: set PERVIT_SOAK=1"))],
)
def test_nothing_is_lost_in_faults_of_the_store(
    faults: int, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a checkpoint that a fresh machine sees without its parts, and against rows, parts or files that a bad line
    loses, over saves and a fetch."""
    draw, share = random.Random(faults), 0.5

    def fault(request: Request) -> Fault | None:
        return draw.choice(KINDS) if draw.random() < share else None

    with s3_server(monkeypatch) as port, HttpProxy(port, 0, fault) as proxy:
        run, place = tmp_path / "run", RemotePath(f"s3://{BUCKET}/{tmp_path.name}")
        run.mkdir()
        (run / "config.yaml").write_text("seed: 0\n")
        witness = RunStore(place)  # sees the store as it is
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        mirror, step = open_mirror(run, place), 0
        while len(proxy.faults) < 0.8 * faults or step < 4:
            step += 1
            save_step(mirror, run, step)
            drain(mirror)
            listing = witness.store.objects()
            newest = witness.newest(listing)
            assert newest and newest.state.step == step and steps_in(listing) == [step - 1, step][-step:]
            seen = tmp_path / f"seen-{step}"
            witness.fetch_checkpoint(newest, seen)
            assert not find_damage(step_folder(seen, step), newest.files)
        while len(proxy.faults) < 0.9 * faults:
            RunStore(place).bring_together(tmp_path / f"fetched-{len(proxy.faults)}", "environment.json")
        mirror.close(600)
        fresh = tmp_path / "fresh"
        RunStore(place).bring_together(fresh, "environment.json")
        while len(proxy.faults) < faults:
            RunStore(place).bring_together(tmp_path / f"fetched-{len(proxy.faults)}", "environment.json")
        for name in ("metrics.jsonl", "config.yaml"):
            assert (fresh / name).read_bytes() == (run / name).read_bytes()
        assert saved_steps(fresh) == [step]
        for path in step_folder(run, step).iterdir():
            assert (step_folder(fresh, step) / path.name).read_bytes() == path.read_bytes()
        assert {type(each) for each in proxy.faults} == {Fault} and len({*map(str, proxy.faults)}) == len(KINDS)


def test_what_a_newer_save_replaces_is_not_uploaded(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against credentials that expire at night and end a run, a backlog that only grows, a best checkpoint that is dropped, and
    retention that takes away what is uploaded."""
    away = False
    with s3_server(monkeypatch) as port, HttpProxy(port, 0, lambda _: Fault(status=403) if away else None) as proxy:
        run, place = tmp_path / "run", RemotePath(f"s3://{BUCKET}/{tmp_path.name}")
        run.mkdir()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        mirror = open_mirror(run, place)
        away = True
        size = save_step(mirror, run, 1).files[0].bytes
        for step, best in ((2, None), (3, 3), (4, 3), (5, 3)):
            save_step(mirror, run, step, best, keep_last=1)
        for step in (1, 2, 4):  # as retention does
            for path in step_folder(run, step).iterdir():
                path.unlink()
        assert mirror.busy and mirror.backlog == 3 * size
        while len(proxy.faults) < 5:
            time.sleep(0.01)
        away = False
        drain(mirror)
        assert mirror.backlog == 0
        store = RunStore(place)
        assert steps_in(store.store.objects()) == [3, 5]
        drain(mirror)
        save_step(mirror, run, 6, 3, keep_last=1)
        drain(mirror)
        assert steps_in(store.store.objects()) == [3, 6]
        assert {name.split("/")[1] for name in store.store.objects() if "part" in name} == {"step-00000003", "step-00000006"}
        written = {request.path for request in proxy.requests if request.method == "PUT"}
        assert not any("step-00000002" in path or "step-00000004" in path for path in written)
        mirror.close()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [warning.count("the run goes on in") for warning in warnings] == [1, 0]
    assert (
        warnings[0].startswith(f"{place} refuses access (the answer was 403)")
        and warnings[1] == f"{place} can be written again"
    )


def test_a_copy_of_a_run_follows_it(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a report of yesterday's run, gigabytes that no command has asked for, and names that lead out of the cache."""
    with s3_server(monkeypatch):
        run, url = tmp_path / "run", f"s3://{BUCKET}/{tmp_path.name}"
        run.mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        mirror = open_mirror(run, RemotePath(url))
        for step in (1, 2):
            save_step(mirror, run, step)
            drain(mirror)
        copy = fetched(url, weights=False)
        assert saved_steps(copy) == [1, 2] and not list(copy.rglob("*.safetensors"))
        assert fetched(f"{url}/checkpoints/step-00000001") == step_folder(copy, 1)
        assert [path.parent.name for path in copy.rglob("*.safetensors")] == ["step-00000001"]
        save_step(mirror, run, 3)
        drain(mirror)
        assert fetched(url) == copy and saved_steps(copy) == [2, 3]
        assert (copy / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
        outside = {name: (1, "") for name in ("../x", "a/../../x", "/x", ".x", "a/.b/x")}
        RunStore(RemotePath(url)).fetch_files(outside, tmp_path / "target")
        assert not (tmp_path / "target").exists() and not (tmp_path / "x").exists()
        mirror.close()
