"""Trainings that read their images from a store which throttles all requests for a while, or whose objects somebody replaces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.checkpoint.bucket import RunStore, steps_in
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import USER_ERROR
from pipeline.stores.place import RemotePath
from support.http_proxy import Fault, HttpProxy
from support.ranks import Job, run_forked
from support.runs import step_rows
from support.small_run import SMALL_MODEL
from support.stores import BUCKET, aws_environment, s3_server, upload

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]

TRAIN = (*SMALL_MODEL, "checkpoint.every_steps=4", "train.max_steps=14", "data.max_bad_samples=10", "seed=3")
STORM = 6.0  # seconds; the pause after 503 is 0.5 s, 1 s, 2 s, ...


@dataclass
class Bucket:
    """The digits, and room for runs, behind a proxy."""

    proxy: HttpProxy
    name: str
    folder: Path
    config: Path

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.name}"

    def train(self, *overrides: str) -> Job:
        variables = {**aws_environment(self.proxy.port), "PERVIT_RUNS": str(self.folder / "runs"), "TMPDIR": str(self.folder)}
        words = ("--config", self.config, *TRAIN, f"data.path={self.url}", *overrides)
        return Job(1, *words, module="support.bucket_train", **variables)

    def rows_of_a_quiet_run(self) -> list[tuple[int, float]]:
        """Step and loss of a run with the same images on this disk."""
        run_forked("pipeline.train", "--config", self.config, *TRAIN, f"output_dir={self.folder / 'quiet'}")
        return rows(self.folder / "quiet")


def rows(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in step_rows(run)]


@pytest.fixture
def bucket(digits_shards: Path, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with s3_server(monkeypatch) as port, HttpProxy(port) as proxy:
        upload(digits_shards, tmp_path.name)
        yield Bucket(proxy, tmp_path.name, tmp_path, small_run)


def test_a_storm_of_503(bucket: Bucket) -> None:
    """Guards against bad samples, a lost upload, or the end of a run, where a store refuses everybody for seconds; half of its answers
    say when to come back."""
    run = bucket.folder / "runs" / BUCKET / bucket.name / "run"
    job = bucket.train(f"output_dir={bucket.url}/run", "data.read_ahead=1")
    assert job.until(lambda: latest_step(run) == 4), job.outputs()
    begun = time.monotonic()

    def storm(request) -> Fault | None:
        if time.monotonic() > begun + STORM:
            return None
        return Fault(status=503, headers={"Retry-After": "2"} if request.number % 2 else {})

    bucket.proxy.fault = storm
    job.succeed()
    assert len(bucket.proxy.faults) >= 3 and time.monotonic() > begun + STORM, "no storm"
    assert rows(run) == bucket.rows_of_a_quiet_run() and "error" not in job.stderr(), job.outputs()
    last = step_rows(run)[-1]
    assert last["store_throttled"] >= 1 and last["bad_samples"] == last["store_errors"] == 0
    assert steps_in(RunStore(RemotePath(f"{bucket.url}/run")).store.objects())[-1] == 14


def test_a_shard_that_is_replaced_during_a_run(bucket: Bucket, digits_shards: Path) -> None:
    """Guards against a run that goes on with other images under the same names, and one that cannot go on once they are restored."""
    import boto3

    run, key = bucket.folder / "run", f"{bucket.name}/train-000001.tar"
    job = bucket.train(f"output_dir={run}")
    assert job.until(lambda: latest_step(run) == 4), job.outputs()
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=(digits_shards / "train-000000.tar").read_bytes())
    assert job.wait() == [USER_ERROR], job.outputs()
    *_, sentence = job.stderr().splitlines()
    assert sentence.startswith("error: ") and "data.max_bad_samples" in sentence and "restore the files" in sentence
    assert f"s3://{BUCKET}/{key}: sample 000001-" in job.stderr() and "was changed after it was written" in job.stderr()
    assert "Traceback" not in job.stderr()

    upload(digits_shards, bucket.name)
    again = bucket.train(f"output_dir={run}").succeed()
    assert f"resuming {run} from step " in again.stdout()
    assert rows(run) == bucket.rows_of_a_quiet_run()
