"""``pervit doctor``: healthy nodes, and sick ones with real faults: mounts, clocks, packages, links, lost processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from faults.nodes import limited, running_nodes
from pipeline.health.nodes import judge
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import Job, meeting_point
from support.slurm_cluster import ON_CPUS, Cluster
from support.stores import BUCKET, aws_environment, s3_server

pytestmark = pytest.mark.multiprocess
NODES = ["n1", "n2", "n3"]


def examined(config: Path, *words: str, seconds: int = 90, missing: int = 0, **environment: object) -> tuple[int | None, str]:
    """Rank 0's exit code and page for three nodes of one rank each; a list has a value for each."""
    if "PERVIT_MOUNT" in environment and os.geteuid() != 0:
        pytest.skip("needs the right to mount a file system")
    count = len(NODES) - missing
    variables = {"SLURMD_NODENAME": NODES[:count], "LOCAL_WORLD_SIZE": "1", **environment}
    more = {"module": "support.doctor_rank", "missing": missing, **variables}
    job = Job(count, "--config", config, f"--seconds={seconds}", *words, **more)  # type: ignore[arg-type]
    assert job.until(lambda: job.code(0) is not None)
    if "PERVIT_STOP" in environment:
        job.kill(count - 1)
    job.wait()
    assert "Traceback" not in job.stderr(), job.outputs()
    print(job.stdout())
    return job.code(0), job.stdout()


def test_healthy_nodes(small_run: Path, tmp_path: Path) -> None:
    """Guards against a node that is left out although nothing is wrong with it, and a table without a figure."""
    code, page = examined(small_run, f"data.cache={tmp_path / 'cache'}")
    assert code == 0 and "verdict: none of 3 nodes to leave out" in page and "--exclude" not in page, page
    head, *rows = [re.split(r"  +", line.strip()) for line in page.splitlines() if re.match(r"node |n\d ", line)]
    assert len(rows) == 3 and all(len(row) == len(head) + 1 and row[-1] == "ok" for row in rows), page
    assert not list((tmp_path / "cache").glob(".doctor*"))


def other_numpy(folder: Path) -> str:
    """A folder for PYTHONPATH in which a package says that it has another version."""
    (folder / "numpy-1.0.dist-info").mkdir()
    (folder / "numpy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    return f"{folder}:{REPOSITORY}:{REPOSITORY / 'tests'}"


def test_a_clock_and_a_version_of_their_own(small_run: Path, tmp_path: Path) -> None:
    """Guards against one package that was left behind on a node, and logs whose times do not fit together."""
    path = other_numpy(tmp_path)
    variables = clean_environment(**{name: str(value) for name, value in meeting_point(3).items()})
    command = [sys.executable, "-m", "support.doctor_rank", "--config", str(small_run), "--seconds=90"]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **variables,
                **{"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SLURMD_NODENAME": NODES[rank]},
                "PYTHONPATH": path if rank == 1 else f"{REPOSITORY}:{REPOSITORY / 'tests'}",
                "PERVIT_CLOCK": "-30" if rank == 2 else "",
            },
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for rank in range(3)
    ]
    page = ranks[0].communicate(timeout=PATIENCE)[0]
    assert [rank.wait(timeout=PATIENCE) for rank in ranks] == [1, 1, 1], page
    print(page)
    assert re.search(r"n2: numpy 1\.0, where most have 2", page) and page.endswith("--exclude=n2,n3\n"), page
    assert "n3: its clock is -30.0 s from the nodes' median" in page
    clocks = dict(re.findall(r"^(n\d) .* ([-+][0-9,.]+) +(?:ok|leave out)$", page, re.MULTILINE))
    assert abs(float(clocks["n1"])) < 1000 and abs(float(clocks["n2"])) < 1000, page  # ms; of three nodes two agree


def test_little_shared_memory(small_run: Path) -> None:
    """Guards against NCCL's bus error in the first step, on the one node whose /dev/shm is full."""
    code, page = examined(small_run, PERVIT_MOUNT=["", "-t tmpfs -o size=8m none /dev/shm", ""])
    assert code == 1 and "n2: /dev/shm has 8 MiB free, at least 64 are needed" in page and page.endswith("--exclude=n2\n"), page


def test_little_memory_and_a_full_disk(small_run: Path, tmp_path: Path) -> None:
    """Guards against a node's memory that is the machine's, where its jobs may have a part, and a cache that cannot be filled."""
    (tmp_path / "cache").mkdir()
    with running_nodes(3) as nodes, limited(nodes.nodes[2], "memory", bytes_=2 << 30):
        nodes.nodes[1].do("mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path / "cache")
        words = ("--config", small_run, "--seconds=90", f"data.cache={tmp_path / 'cache'}")
        job = nodes.job(*words, module="pipeline.doctor", LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=NODES)
        assert job.wait() == [1, 1, 1], job.outputs()
    page = job.stdout()
    print(page)
    assert re.search(r"n3: (1\.\S+|0\.\S+) GiB free, less than a third of the nodes' median", page), page
    assert "n2: cache: [Errno 28] No space left on device" in page and page.endswith("--exclude=n2,n3\n"), page


def test_a_run_in_a_store(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run that trains until its first checkpoint and learns then that a node may not write to the store."""
    with s3_server(monkeypatch) as port:
        store, words = aws_environment(port), (small_run, f"output_dir=s3://{BUCKET}/run")
        code, page = examined(*words, **store)
        assert code == 0 and "verdict: none of 3 nodes to leave out" in page, page
        urls = [*2 * [store.pop("AWS_ENDPOINT_URL")], "http://127.0.0.1:9"]
        code, page = examined(*words, **store, AWS_ENDPOINT_URL=urls)
        assert code == 1 and "n3: output_dir: " in page and page.endswith("--exclude=n3\n"), page
        code, page = examined(small_run, f"output_dir=s3://{BUCKET}er/run", **store, AWS_ENDPOINT_URL=urls[0])
    assert code == 1 and "every node: output_dir: " in page and "verdict: none of 3 nodes" in page, page


def well(names: Iterable[str], **more: Any) -> dict[str, dict[str, Any]]:
    """What is known of healthy nodes."""
    found = {"versions": {"numpy": "2.4"}, "CPUs": 96, "ranks": 8, "clock": 0.0, "link": 11e3, "batches": 16, "damaged": {}}
    return {name: {**found, "faults": [], "lost": [], "cut": [], "clocks": {}, **more} for name in names}


def test_a_page_of_many_nodes() -> None:
    """Guards against a verdict below sixty rows and sixty sentences that say the same."""
    nodes = well(f"n{number}" for number in range(64))
    for name in ("n7", "n20", "n40"):
        nodes[name]["versions"] = {"numpy": "1.26"}
    nodes["n9"]["link"] = 1200.0
    verdict = judge(nodes)
    assert verdict.leave_out == ["n7", "n9", "n20", "n40"] and verdict.lines[-1] == "--exclude=n7,n9,n20,n40"
    assert "n7, n20, n40: numpy 1.26, where most have 2.4" in verdict.lines
    others = [f"60 others, {what}" for what in ("least", "median", "most")]
    assert [line.split("  ")[0] for line in verdict.lines[1:8]] == [*verdict.leave_out, *others]
    assert len(verdict.lines) == 1 + 7 + 2 + 2 and len(judge(well(NODES)).lines) == 1 + 3 + 1


@pytest.mark.parametrize(
    ("edits", "leave_out", "said"),
    [
        ({"n1": {"cut": ["n2", "n3", "n4"]}, "n2": {"cut": ["n1"]}}, ["n1"], "n1: its links to 3 nodes fail"),
        (
            {"n1": {"cut": ["n3", "n4"]}, "n2": {"cut": ["n3", "n4"]}},
            [],
            "undecided, which node is at fault: the link between n1 and n3",
        ),
        ({name: {"cut": ["n3", "n4"]} for name in ("n1", "n2", "n3", "n4")}, ["n3", "n4"], "n3, n4: its links to 3 nodes fail"),
        ({"n3": {"cut": ["n4"]}}, [], "undecided, which node is at fault: the link between n3 and n4 fails"),
        ({"n4": {"clocks": {"n1": 9.0, "n2": 9.0, "n3": 9.0}, "clock": 9.0}}, ["n4"], "n4: its clock is +9.0 s"),
        (
            {"n1": {"versions": {"numpy": "2.3"}}, "n2": {"versions": {"numpy": "2.3"}}},
            [],
            "numpy is 2.3 on n1, n2, 2.4 on n3, n4",
        ),
        (
            {"n2": {"decodes": "cpu"}, **{name: {"decodes": "whole"} for name in ("n1", "n3")}, "n4": {"decodes": "regions"}},
            ["n2"],
            "n2: its GPU's",
        ),
        ({name: {"decodes": "cpu"} for name in ("n1", "n2", "n3", "n4")}, [], ""),
        (
            {"n1": {"damaged": {"bad": 12}}, "n2": {"damaged": {"bad": 12}}, "n3": {"batches": 9}, "n4": {"batches": 9}},
            [],
            "the data itself",
        ),
        ({"n1": {"damaged": {"bad": 9}}, "n2": {"batches": 8}}, ["n1"], "n1: 1 image it reads damaged"),
        ({name: {"shm": 0.01 * at} for at, name in enumerate(("n1", "n2", "n3", "n4"), 1)}, [], "n3: /dev/shm has 31 MiB free"),
        ({"n4": {"lost": [24], "cut": ["n1", "n2"]}, "n1": {"cut": ["n4"]}}, ["n4"], "n4: no answer from rank 24"),
    ],
)
def test_who_is_blamed(edits: dict[str, dict[str, Any]], leave_out: list[str], said: str) -> None:
    """Guards against a healthy node that is left out for its partner's link, a tie, a better decoder, or an image that others had no
    time to read; and a fault that is not said because all nodes have it, or because it is a pair's."""
    nodes = well(["n1", "n2", "n3", "n4"])
    for name, edit in edits.items():
        nodes[name] |= edit
    verdict = judge(nodes)
    assert verdict.leave_out == leave_out and verdict.sick == bool(said), verdict.lines
    assert any(said in line for line in verdict.lines), verdict.lines


def test_one_machine_and_a_job_of_two() -> None:
    """Guards against "1 of 1 node to leave out", and against rank 0's node, which is right whatever it has."""
    alone = judge(well(["box"], faults=["data: ..."]))
    assert not alone.leave_out and alone.sick and alone.lines[-1] == "verdict: none of 1 node to leave out"
    two = well(["n1", "n2"])
    two["n1"]["versions"] = {"numpy": "1.26"}
    two["n2"] |= {"clocks": {"n1": 30.0}, "cut": ["n1"]}
    lines = judge(two).lines
    assert lines[-1] == "verdict: none of 2 nodes to leave out" and len([line for line in lines if "undecided" in line]) == 3, (
        lines
    )


def spoiled(shards: Path, copy: Path) -> Path:
    """A copy of a shard set with the middle of a tar overwritten, of the same size."""
    shutil.copytree(shards, copy)
    with open(copy / "train-000002.tar", "r+b") as tar:
        tar.seek((copy / "train-000002.tar").stat().st_size // 3)
        tar.write(os.urandom(20_000))
    return copy


def test_a_corrupt_shard_on_one_node_and_on_all(small_run: Path, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a node that is blamed for the data, and a bad copy that is blamed on the data."""
    copy = spoiled(digits_shards, tmp_path / "copy")
    code, page = examined(small_run, PERVIT_MOUNT=["", "", f"--bind {copy} {digits_shards}"])
    assert code == 1 and re.search(r"n3: \d+ images it reads damaged, unlike the others: .*train-000002", page), page
    assert page.endswith("--exclude=n3\n")
    code, page = examined(small_run, f"data.path={copy}")
    assert code == 1 and "the data itself, on every node" in page and "--exclude" not in page, page


@pytest.mark.long
def test_a_disk_that_is_slow_and_one_that_never_answers(small_run: Path) -> None:
    """Guards against a doctor that waits for the file server that it should find."""
    code, page = examined(small_run, PERVIT_READ=["", "", "0.02"])
    assert code == 1 and re.search(r"n3: \S+ data MB/s, less than a third of the nodes' median", page), page
    code, page = examined(small_run, seconds=30, PERVIT_READ=["", "stalled", ""])
    assert code == 1 and re.search(r"n2: data: no answer within \d s", page) and page.endswith("--exclude=n2\n"), page


@pytest.mark.long
def test_a_rank_that_stops_and_one_that_never_comes(small_run: Path) -> None:
    """Guards against a doctor that hangs, and against its blaming those that waited."""
    code, page = examined(small_run, seconds=30, PERVIT_STOP=["", "", "1"])
    assert code == 1 and "n3: no answer from rank 2" in page and page.endswith("--exclude=n3\n"), page
    code, page = examined(small_run, seconds=15, missing=1)
    assert code == 1 and "waiting for rank 2 of 3 ranks" in page and "the node of rank 2 to leave out" in page, page


@pytest.mark.long
def test_a_slow_link(small_run: Path) -> None:
    """Guards against a network port that has fallen back to a tenth of its rate, which slows every rank alike."""
    with running_nodes(3) as nodes:
        nodes.switch.set(nodes.switch.between(2), bandwidth=2.5e6)
        job = nodes.job(
            *("--config", small_run, "--seconds=120"), module="pipeline.doctor", LOCAL_WORLD_SIZE="1", SLURMD_NODENAME=NODES
        )
        assert job.wait() == [1, 1, 1], job.outputs()
    page = job.stdout()
    print(page)
    assert re.search(r"n3: \S+ link MB/s, less than a third of the nodes' median", page) and page.endswith("--exclude=n3\n"), (
        page
    )


def test_a_training_does_not_begin_on_a_sick_node(small_run: Path, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against ``--doctor`` that is only looked at afterwards."""
    copy = spoiled(digits_shards, tmp_path / "copy")
    words = ("--config", small_run, f"data.path={copy}", "--doctor", "train.max_steps=1")
    job = Job(2, *words)
    assert job.wait() == [2, 2], job.outputs()
    assert "must not train as it is" in job.stderr() and not (tmp_path / "run" / "metrics.jsonl").exists()
    healthy = Job(2, "--config", small_run, "--doctor", "train.max_steps=1", "train.micro_batch_size=8").succeed()
    assert "verdict: none of 1 node to leave out" in healthy.stdout()


@pytest.mark.long
@pytest.mark.slurm
def test_a_job_of_its_own(small_run: Path, tmp_path: Path, cluster: Cluster) -> None:
    """Guards against nodes with other names than sbatch's ``--exclude`` takes, and a job that requeues itself on them."""
    words = (*ON_CPUS, "--nodes=2", "--ntasks-per-node=2", "launch/doctor.slurm", small_run)
    job = cluster.job(tmp_path, *words)
    assert job.state == "COMPLETED" and "verdict: none of 2 nodes to leave out" in job.log, job.log
    assert len(re.findall(r"^0: node\d +2 .* ok$", job.log, re.MULTILINE)) == 2, job.log
    (small_run.parent / "damaged").mkdir()
    job = cluster.job(tmp_path, *words, f"data.path={small_run.parent / 'damaged'}")
    assert job.state == "FAILED" and "every node: data: " in job.log and "verdict: none of 2" in job.log, job.log
    assert "--exclude" not in job.log and "requeued" not in job.log, job.log
