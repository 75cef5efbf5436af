"""What torchrun's agents and Slurm do when a node is cut off, a process is killed for lack of memory, or a rank starts late or never.

Nodes as in ``nodes.py``; ``PERVIT_SOAK=1``. With ``-s`` each prints what it saw and after how many seconds.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from faults.nodes import Node, Nodes, limited, running_nodes, short_of_memory
from faults.slurm_nodes import SlurmOfNodes, slurm_of_nodes
from faults.test_launchers import TORCHRUN, Launched, training
from faults.test_requeue import Training
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import RANK_LOST
from support.launching import REPOSITORY
from support.ranks import free_port, steps_taken
from support.runs import step_rows
from support.slurm_cluster import Submitted, free_ports

pytestmark = [pytest.mark.multiprocess, pytest.mark.soak, pytest.mark.timeout(1500)]
LIMITS = {"silence_timeout": 5, "progress_timeout": 20}
STEPS, EVERY = 60, 20


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def config(small_run: Path) -> Path:
    """Of the training that all start, with short limits."""
    small_run.write_text(yaml.safe_dump({**yaml.safe_load(small_run.read_text()), "distributed": LIMITS}))
    return small_run


class Watch:
    """Says what happened, and how many seconds after the fault."""

    def __init__(self, said: Callable[[], str] = str) -> None:
        self.said, self._began = said, time.monotonic()  # said: for an error

    def until(self, what: str, happened: Callable[[], object], patience: float = 400.0) -> object:
        while not (found := happened()):
            assert time.monotonic() - self._began < patience, (what, self.said())
            time.sleep(0.1)
        said = found[0] if isinstance(found, re.Match) else ""
        print(f"{time.monotonic() - self._began:6.1f} s: {what} {said}", flush=True)
        return found


# ---- Slurm ------------------------------------------------------------------------------------


class Trial(Training):
    """A job on n1 and n2, with a third node to spare."""

    cluster: SlurmOfNodes

    def until_a_checkpoint(self) -> Submitted:
        job = self.submit()
        job.wait("past a checkpoint", lambda: self.at_step(EVERY + 5))
        return job

    def see(self, watch: Watch, job: Submitted, *patterns: str) -> None:
        for pattern in patterns:
            watch.until("log:", lambda pattern=pattern: re.search(pattern, job.log, re.MULTILINE))

    def see_it_requeued(self, watch: Watch, job: Submitted) -> None:
        watch.until("requeued", lambda: int(job.shown("Restarts")) == 1)
        print(self.cluster.run("sinfo", "--noheader", "--Node", "--format=%n %T"))
        job.wait("running again", lambda: "restarts: 1," in job.log)
        watch.until("log:", lambda: re.search("^job .* restarts: 1,.*", job.log, re.MULTILINE))

    def ends_well(self, job: Submitted) -> None:
        self.assert_finished(job.end(), job)


@pytest.fixture
def lab(stack: ExitStack) -> Nodes:
    """A controller, two nodes and one to spare."""
    return stack.enter_context(running_nodes(4))


@pytest.fixture
def on_slurm(lab: Nodes, config: Path, tmp_path: Path, stack: ExitStack) -> Callable[[], Trial]:
    def start() -> Trial:
        cluster = stack.enter_context(slurm_of_nodes(next(free_ports()), lab))
        return Trial(cluster, tmp_path, REPOSITORY, config, steps=STEPS, every=EVERY)

    return start


@pytest.mark.slurm
def test_slurm_and_a_node_that_is_cut_off(lab: Nodes, on_slurm: Callable[[], Trial]) -> None:
    """Guards against a job that waits for a node until its time limit, or goes on with it."""
    trial = on_slurm()
    job = trial.until_a_checkpoint()
    watch = Watch()
    lab.switch.set(lab.switch.between(2), loss=1.0)
    trial.see(watch, job, r"error: rank 1 \(host n2.*10.77.0.3\) does not answer either.*")
    trial.see_it_requeued(watch, job)
    assert re.search(r"^job \S+ on n\[1,3\], restarts: 1", job.log, re.MULTILINE), job.log
    trial.ends_well(job)


@pytest.mark.slurm
def test_slurm_and_a_lack_of_memory(lab: Nodes, on_slurm: Callable[[], Trial], stack: ExitStack) -> None:
    """Guards against a kill that ends the job, and a healthy node that Slurm would leave out for it."""
    group = stack.enter_context(limited(lab.nodes[2], "memory", bytes_=8 << 30))
    trial = on_slurm()
    job = trial.until_a_checkpoint()
    watch = Watch()
    with short_of_memory(group):
        trial.see(watch, job, r"error: rank 1 \(host n2.*for lack of memory.*")
    trial.see_it_requeued(watch, job)
    trial.ends_well(job)


@pytest.mark.slurm
def test_slurm_and_a_rank_that_starts_late(on_slurm: Callable[[], Trial]) -> None:
    """Guards against a start that waits without saying for which node."""
    trial = on_slurm()
    job = trial.submit()
    stopped = trial.cluster.stop(job, 1)
    watch = Watch()
    trial.see(watch, job, r"rank 0 has waited 20 s for rank 1 of 2 ranks \(on n2\).*")
    trial.cluster.send(signal.SIGCONT, stopped)
    trial.ends_well(job)


@pytest.mark.slurm
def test_slurm_and_a_rank_that_never_comes(on_slurm: Callable[[], Trial]) -> None:
    """Guards against a job that waits until its time limit for a process that hangs before it has met the others."""
    trial = on_slurm()
    job = trial.submit()
    trial.cluster.stop(job, 1)
    watch = Watch()
    trial.see(watch, job, r"error: rank 0 timed out waiting for rank 1 of 2 ranks \(on n2\).*")
    trial.see_it_requeued(watch, job)
    trial.ends_well(job)


# ---- torchrun ---------------------------------------------------------------------------------


class Agents:
    """An agent of torchrun on each of two nodes, with two ranks each."""

    def __init__(self, nodes: Nodes, folder: Path, *words: object) -> None:
        self._nodes, self._folder, self._words = nodes, folder, words
        self.place = f"{nodes.nodes[0].address}:{free_port()}"
        self.agents: dict[int, Launched] = {}

    def start(self, *numbers: int) -> Agents:
        for node in (self._nodes.nodes[number] for number in numbers):
            self.agents[node.number] = Launched(
                self._folder, *joining(node), *node.inside, "env", "-C", REPOSITORY, *TORCHRUN, "--nnodes=2", "--nproc-per-node=2",
                "--rdzv-backend=c10d", f"--rdzv-endpoint={self.place}", "--rdzv-id=lab", f"--local-addr={node.address}",
                "--max-restarts=3", *self._words, PYTHONPATH=str(REPOSITORY),
            )  # fmt: skip
        return self

    @property
    def said(self) -> str:
        return "".join(agent.out + agent.errors for agent in self.agents.values())

    def stop(self) -> None:
        for agent in self.agents.values():
            agent.process.kill()
            agent.process.wait()


def joining(node: Node) -> list[str]:
    """The words before a command that joins the node's cgroups."""
    return ["sh", "-c", "".join(f"echo 0 > {group}/cgroup.procs; " for group in node.cgroups) + 'exec "$@"', "sh"]


@pytest.fixture
def agents(config: Path, tmp_path: Path, stack: ExitStack) -> Callable[[Nodes], Agents]:
    words = training(config, tmp_path / "run", f"train.max_steps={STEPS}", f"checkpoint.every_steps={EVERY}")

    def make(nodes: Nodes) -> Agents:
        made = Agents(nodes, tmp_path, *words)
        stack.callback(made.stop)
        return made

    return make


@pytest.fixture
def pair(stack: ExitStack, tmp_path: Path) -> Nodes:
    nodes = stack.enter_context(running_nodes(2))
    nodes.name_all(tmp_path / "hosts")  # which torchrun looks up
    return nodes


def ends_well(watch: Watch, agents: Agents, run: Path) -> None:
    watch.until("at its end", lambda: latest_step(run) == STEPS)
    watch.until("agents ended", lambda: all(agent.process.poll() is not None for agent in agents.agents.values()))
    assert [agent.process.returncode for agent in agents.agents.values()] == [0, 0], agents.said[-4000:]
    assert [row["step"] for row in step_rows(run)] == list(range(1, STEPS + 1))


def test_torchrun_and_a_node_that_is_cut_off(pair: Nodes, agents: Callable[[Nodes], Agents], tmp_path: Path) -> None:
    """Guards against agents that wait for a lost node's processes, and a node that cannot come back once its network is mended."""
    both, run = agents(pair).start(0, 1), tmp_path / "run"
    Watch(lambda: both.said).until("past a checkpoint", lambda: steps_taken(run) >= EVERY + 5)
    watch = Watch()
    pair.switch.set(pair.switch.between(1), loss=1.0)
    watch.until("log:", lambda: re.search(r"error: rank [23] \(host n1.*10.77.0.2\) does not answer either.*", both.said))
    watch.until("n0's agent:", lambda: re.search(rf"failed \(exitcode: {RANK_LOST}\)", both.agents[0].errors))
    time.sleep(10)
    pair.switch.set(pair.switch.between(1), loss=0.0)
    watch.until("mended; log:", lambda: re.search(r"resuming .* from step \d+", both.said))
    ends_well(watch, both, run)


def test_torchrun_and_a_lack_of_memory(
    pair: Nodes, agents: Callable[[Nodes], Agents], tmp_path: Path, stack: ExitStack
) -> None:
    """Guards against a kill by the kernel that ends more than the start that it befell."""
    group, run = stack.enter_context(limited(pair.nodes[1], "memory", bytes_=8 << 30)), tmp_path / "run"
    both = agents(pair).start(0, 1)
    Watch(lambda: both.said).until("past a checkpoint", lambda: steps_taken(run) >= EVERY + 5)
    watch = Watch()
    with short_of_memory(group):
        watch.until("log:", lambda: re.search(r"error: rank [23] \(host n1.*for lack of memory.*", both.said))
    watch.until("log:", lambda: re.search(r"resuming .* from step \d+", both.said))
    ends_well(watch, both, run)


def test_torchrun_and_an_agent_that_starts_late(pair: Nodes, agents: Callable[[Nodes], Agents], tmp_path: Path) -> None:
    """Guards against a start that does not wait for a slow node."""
    both, watch = agents(pair).start(0), Watch()
    time.sleep(40)
    print(both.said)
    both.start(1)
    ends_well(watch, both, tmp_path / "run")
