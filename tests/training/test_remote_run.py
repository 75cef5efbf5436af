"""A run whose data is in a store: refused credentials cost it nothing, and it resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from support.http_proxy import Fault, HttpProxy
from support.launching import run_module
from support.runs import step_rows, write_small_config
from support.small_run import SMALL_MODEL
from support.stores import nginx

TRAIN = ("train.micro_batch_size=8", "log.every_steps=2", "train.max_steps=24", "data.max_bad_samples=0", "log.samples=true")


def samples_by_step(run: Path) -> dict[int, set[tuple]]:
    """Step -> place, sample and augmentation of all its images, from the latest line of each rank."""
    steps: dict[int, set[tuple]] = {}
    for path in sorted((run / "samples").glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            images = zip(line["epoch"], line["position"], line["sample"], line["augmentation"])
            steps.setdefault(line["step"], set()).update(images)
    return steps


@pytest.mark.multiprocess
def test_refused_credentials_end_a_run_that_saved_and_resumes(copied_shards: Path, tmp_path: Path) -> None:
    """Guards against credentials that expire at night and take hours of training with them, and against a stream that is another
    one after a resume from a store."""
    config = write_small_config(copied_shards, tmp_path)
    refused = False
    with nginx(copied_shards.parent, tmp_path / "nginx") as port:
        with HttpProxy(port, 0, lambda request: Fault(status=403) if refused and request.number > 190 else None) as proxy:
            remote = ("--config", config, *SMALL_MODEL, *TRAIN, f"data.path=http://127.0.0.1:{proxy.port}/shards")
            refused = True
            ended = run_module("pipeline.train", *remote, processes=2, check=False)
            refused = False
            assert ended.returncode == 2, ended.stderr[-3000:]
            assert ended.stderr.count("/shards refuses access (the answer was 403): renew the credentials") == 1
            assert "Traceback" not in ended.stderr
            (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
            rows = step_rows(tmp_path / "run")
            assert 0 < int(saved.name[-8:]) == rows[-1]["step"] < 24 and rows[-1]["store_denied"] > 0
            run_module("pipeline.train", *remote)
    assert [row["step"] for row in step_rows(tmp_path / "run")] == list(range(1, 25))
    run_module("pipeline.train", "--config", config, *SMALL_MODEL, *TRAIN, f"output_dir={tmp_path / 'local'}")
    assert samples_by_step(tmp_path / "run") == samples_by_step(tmp_path / "local")
    assert "store_requests" not in step_rows(tmp_path / "local")[-1]
