"""The job scripts on a real Slurm: a cluster of two nodes on this machine, started by ``launch/local_cluster.sh``."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step
from pipeline.shards.shard_set import ShardSet
from support.launching import PATIENCE, REPOSITORY
from support.runs import evaluation_rows, step_rows
from support.slurm_cluster import ON_CPUS, Cluster, free_ports, running_cluster

pytestmark = pytest.mark.slurm

TOLD = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURMD_NODENAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(scope="module")
def ports() -> Iterator[int]:
    return free_ports()


@pytest.fixture(scope="module")
def cluster(ports: Iterator[int]) -> Iterator[Cluster]:
    """Two nodes for all tests of this file."""
    with running_cluster(next(ports)) as started:
        yield started


@pytest.fixture
def toy_repository(tmp_path: Path) -> Path:
    """The launch scripts around a ``pipeline.train`` that prints what it was given and exits as told."""
    root = tmp_path / "toy repository"  # a path with a space
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, root / name)
    (root / "pipeline").mkdir()
    (root / "pipeline" / "__init__.py").touch()
    (root / "pipeline" / "train.py").write_text(
        "import json, os, sys\n"
        f"told = {{name: os.environ[name] for name in {TOLD}}}\n"
        "print(json.dumps({'arguments': sys.argv[1:], **told}))\n"
        "sys.exit(2 if 'fail' in sys.argv else 0)\n"
    )
    return root


def test_two_nodes(cluster: Cluster) -> None:
    """Guards against a cluster that is one node in disguise, on which nothing between nodes is tested."""
    assert cluster.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "2"
    lines = cluster.run("srun", "--nodes=2", "sh", "-c", "echo $SLURMD_NODENAME $(hostname)").splitlines()
    names, hosts = zip(*(line.split() for line in sorted(lines)), strict=True)
    assert len(set(names)) == 2
    if names[0] == "node1":  # with the right to give the nodes host names
        assert hosts == names
        assert socket.gethostname() not in hosts, "the machine itself was renamed"


def test_up_twice(cluster: Cluster) -> None:
    """Guards against a second ``up`` that starts daemons over the running ones, or hides that the size is another one."""
    again, other = cluster.script("up", 2), cluster.script("up", 3)
    assert (again.returncode, again.stdout) == (0, f"export SLURM_CONF={cluster.folder}/etc/slurm.conf\n")
    assert "is up already" in again.stderr
    assert (other.returncode, other.stdout) == (2, "")
    assert "got a request for 3" in other.stderr


def test_tasks_find_each_other(cluster: Cluster, toy_repository: Path, tmp_path: Path) -> None:
    """Guards against ranks that are missing or doubled, tasks that wait at different addresses, and sbatch-line overrides
    that are lost, split at a space, or lose against the script's own."""
    words = ["data.path=/elsewhere", "a=b c"]
    job = cluster.job(
        tmp_path,
        "--nodes=2",
        "--ntasks-per-node=2",
        *ON_CPUS,
        "launch/pervit_m.slurm",
        *words,
        cwd=toy_repository,
        PERVIT_DATA="/shards",
    )
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    tasks = [json.loads(line.partition(": ")[2]) for line in job.log.splitlines() if re.match(r"\d: {", line)]
    assert sorted(task["SLURM_PROCID"] for task in tasks) == ["0", "1", "2", "3"]
    assert sorted((task["SLURM_NODEID"], task["SLURM_LOCALID"]) for task in tasks) == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert {task["SLURM_STEP_NUM_TASKS"] for task in tasks} == {"4"}
    first_node = next(task["SLURMD_NODENAME"] for task in tasks if task["SLURM_PROCID"] == "0")
    assert {task["MASTER_ADDR"] for task in tasks} == {first_node}
    assert len({task["MASTER_PORT"] for task in tasks}) == 1
    for task in tasks:
        assert task["arguments"] == [
            "--config",
            "configs/pervit_m.yaml",
            "data.path=/shards",
            "output_dir=runs/pervit_m",
            *words,
        ]


def test_a_job_on_one_node_listens_on_loopback_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Guards against a store or a connection that other machines reach although none of them takes part."""
    root = tmp_path / "repository"
    for name in ("launch", "pipeline", "configs"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pipeline" / "train.py").write_text(
        "import json, psutil\n"
        "from pipeline.cluster.rendezvous import disconnect, init_world\n"
        "world = init_world()\n"
        "found = psutil.Process().net_connections('inet')\n"
        "addresses = [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN]\n"
        "print(json.dumps(world.gather(addresses)), flush=True)\n"
        "disconnect()\n"
    )
    job = cluster.job(tmp_path, "--nodes=1", "--ntasks-per-node=2", *ON_CPUS, "launch/pervit_t.slurm", cwd=root)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    store, other = json.loads(re.search(r"^0: (\[\[.*)$", job.log, re.MULTILINE)[1])
    assert len(store) > len(other) > 0, "the store and gloo"
    assert {address for address in store + other if not ipaddress.ip_address(address).is_loopback} == set()


@pytest.mark.parametrize("script", ["pervit_t.slurm", "pervit_s.slurm", "pervit_m.slurm", "train.slurm"])
def test_production_settings_are_accepted(script: str, cluster: Cluster, toy_repository: Path, tmp_path: Path) -> None:
    """Guards against #SBATCH lines and options of srun that Slurm refuses, cores that no task has, and a job that reports success
    although its training failed."""
    words = ["launch/demo.sh"] if script == "train.slurm" else []  # any file for a config: the toy does not read it
    job = cluster.job(tmp_path, f"launch/{script}", *words, "fail", cwd=toy_repository)
    assert (job.state, job.exit_code) == ("FAILED", 2), job.log
    assert "Exited with exit code 2" in job.log
    assert "CPUs for each: 24, " in job.log, "the node's 192 for 8 tasks"


@pytest.mark.parametrize("variables", [{}, {"PERVIT_DATA": "/shards", "PERVIT_OUTPUT": "/a b"}])
def test_any_config(variables: dict[str, str], cluster: Cluster, toy_repository: Path, tmp_path: Path) -> None:
    """Guards against a general job script that trains in another folder than the config's, or ignores where it was told to."""
    config = tmp_path / "a config.yaml"
    config.touch()
    script = "launch/train.slurm"
    job = cluster.job(tmp_path, "--ntasks-per-node=1", *ON_CPUS, script, config, "seed=1", cwd=toy_repository, **variables)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    (task,) = [json.loads(line.partition(": ")[2]) for line in job.log.splitlines() if re.match(r"\d: {", line)]
    folders = ["data.path=/shards", "output_dir=/a b"] if variables else []
    assert task["arguments"] == ["--config", str(config), *folders, "seed=1"]


@pytest.mark.parametrize(("variables", "folder"), [({}, "runs/pervit_s_4"), ({"PERVIT_OUTPUT": "/a %a/%a b"}, "/a 4/4 b")])
def test_a_task_of_an_array(
    variables: dict[str, str], folder: str, cluster: Cluster, toy_repository: Path, tmp_path: Path
) -> None:
    """Guards against runs of an array that share a folder or a seed."""
    options = ("--array=4", "--nodes=1", "--ntasks-per-node=1", *ON_CPUS)
    job = cluster.job(tmp_path, *options, "launch/pervit_s.slurm", "seed=%a", "a=%A", cwd=toy_repository, **variables)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    (task,) = [json.loads(line.partition(": ")[2]) for line in job.log.splitlines() if re.match(r"\d: {", line)]
    assert task["arguments"][3:] == [f"output_dir={folder}", "seed=4", "a=%A"]


def test_a_plan_in_place_of_a_training(cluster: Cluster, toy_repository: Path, tmp_path: Path) -> None:
    """Guards against a job that trains although it was asked what it would take, and a plan of the script's size instead of sbatch's."""
    (toy_repository / "pipeline" / "plan.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    options = ("--nodes=2", "--ntasks-per-node=3", *ON_CPUS)
    job = cluster.job(tmp_path, *options, "launch/pervit_t.slurm", "--plan", "seed=1", cwd=toy_repository)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    said = json.loads(job.log)
    assert said[7] in ("10", "10:00")  # ON_CPUS: ten minutes
    assert said[10] == "--cpus" and int(said[11]) >= 1  # of a node, as Slurm says
    size = ["--nodes", "2", "--gpus-per-node", "3", "--time-limit", said[7], "--gpu", "cpu", *said[10:12]]
    folders = ["data.path=data/imagenet", "output_dir=runs/pervit_t"]
    assert said == ["--config", "configs/pervit_t.yaml", *size, *folders, "seed=1"]


@pytest.mark.parametrize("words", [[], ["configs/convit_z.yaml"], ["train.epochs=1"]])
def test_no_config(words: list[str], cluster: Cluster, tmp_path: Path) -> None:
    """Guards against a forgotten or misspelt config that is answered by bash, or by every task."""
    job = cluster.job(tmp_path, *ON_CPUS, "launch/train.slurm", *words)
    assert (job.state, job.exit_code) == ("FAILED", 2), job.log
    (sentence,) = job.log.splitlines()
    assert sentence.startswith(f"error: the first word must be a config file or a name in configs/, got '{''.join(words)}'")


def test_submitted_from_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    """Guards against a job that cannot find the repository and says so in bash's words."""
    job = cluster.job(tmp_path, *ON_CPUS, "--nodes=1", REPOSITORY / "launch" / "pervit_t.slurm", cwd=tmp_path)
    assert (job.state, job.exit_code) == ("FAILED", 2), job.log
    assert "submit from there or set PERVIT_ROOT" in job.log
    assert len(job.log.splitlines()) == 1


@pytest.mark.long
def test_training_over_two_nodes(cluster: Cluster, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a job script and a training that each work alone but not together."""
    run = tmp_path / "run"
    overrides = [
        f"data.path={digits_shards}",
        f"output_dir={run}",
        "data.num_threads=1",
        "model.num_classes=10",
        "model.image_size=64",
    ]
    batches = [
        "train.global_batch_size=16",
        "train.micro_batch_size=8",
        "train.epochs=1",
        "train.max_steps=3",
        "optim.warmup_epochs=0.1",
    ]
    job = cluster.job(tmp_path, "--nodes=2", "--ntasks-per-node=1", *ON_CPUS, "launch/pervit_t.slurm", *overrides, *batches)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log[-4000:]
    assert [row["step"] for row in step_rows(run)] == [1, 2, 3]
    assert [(row["step"], row["count"]) for row in evaluation_rows(run)] == [(3, len(ShardSet(digits_shards, "val")))]
    assert latest_step(run) == 3
    assert list(run.rglob("events.out.tfevents.*"))


def test_bad_override(cluster: Cluster, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a typing mistake that is answered with a traceback, or with a job that counts as completed."""
    overrides = [f"data.path={digits_shards}", f"output_dir={tmp_path / 'run'}", "train.max_stepz=3"]
    job = cluster.job(tmp_path, "--nodes=1", "--ntasks-per-node=1", *ON_CPUS, "launch/pervit_t.slurm", *overrides)
    assert (job.state, job.exit_code) == ("FAILED", 2), job.log
    assert "Traceback" not in job.log
    (sentence,) = [line for line in job.log.splitlines() if "train.max_stepz" in line]
    assert sentence.startswith("0: error: ")
    assert "train.max_steps" in sentence  # the remedy


def test_down_leaves_nothing(ports: Iterator[int]) -> None:
    """Guards against daemons and jobs that live on, hold the ports and slow the machine after the tests."""
    cluster = Cluster(next(ports))
    seconds = f"{random.randrange(100000, 200000)}"  # marks our job among all processes
    try:
        cluster.up(1)
        cluster.run("sbatch", "--output=/dev/null", f"--wrap=sleep {seconds}")
        deadline = time.monotonic() + PATIENCE
        while not _processes_with(f"sleep {seconds}") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _processes_with(f"sleep {seconds}"), "the job did not start"
        assert len(_processes_with(str(cluster.folder))) >= 3  # munged, slurmctld, slurmd
        assert cluster.script("down").returncode == 0
        assert _processes_with(str(cluster.folder)) == []
        assert _processes_with(f"sleep {seconds}") == []
    finally:
        cluster.down()  # a second time: must do no harm


def _processes_with(text: str) -> list[str]:
    """Command lines that contain ``text``; an ended process that nobody has waited for has none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if text in words and path.parent.name != str(os.getpid()):
            found.append(words)
    return found
