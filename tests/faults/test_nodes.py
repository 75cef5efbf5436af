"""What happens to a node of several: the line in rank 0's log, the exit codes, and the run that the same command goes on with.

Real networks between namespaces, see ``nodes.py``. The quick cases run at the same time; the rest with ``PERVIT_SOAK=1``.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from faults import refusing
from faults.history import Start, what_the_weights_saw
from faults.nodes import Nodes, limited, running_nodes, short_of_memory
from faults.test_full_disk import fill, small_disk
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import RANK_LOST, USER_ERROR
from support.launching import PATIENCE
from support.ranks import Job, steps_taken, train
from support.runs import step_rows, write_small_config
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

STEPS, EVERY, FAULT_STEP = 32, 8, 11
LIMIT, PROGRESS = 5, 60  # silence_timeout and progress_timeout; a read may take a sixth of the latter
OPTIONS = (f"train.max_steps={STEPS}", f"checkpoint.every_steps={EVERY}", f"distributed.silence_timeout={LIMIT}")
BOUND = LIMIT + 10  # what heartbeat.py promises, in seconds from the fault to the end of all
CLOCK = Path(__file__).with_name("clock.c")


@dataclass
class Trial:
    """A training on some nodes, of which something befalls the second."""

    nodes: Nodes
    shards: Path
    folder: Path
    stack: ExitStack
    progress: int = PROGRESS
    job: Job = field(init=False)
    fallen: Job | None = None  # that of the fault, once it was started again
    starts: list[Start] = field(default_factory=list)
    fault_at: float = 0.0  # by the monotonic clock

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.run = self.folder / "run"
        self.config = write_small_config(self.shards, self.folder)

    @property
    def size(self) -> int:
        return len(self.nodes.nodes)

    def start(self, *overrides: str, **environment: object) -> Trial:
        """The same command each time."""
        self.starts.append(Start(time.time(), latest_step(self.run) or 0, self.size))
        words = ("--config", self.config, f"output_dir={self.run}", "log.samples=true", *SMALL_MODEL, *OPTIONS)
        self.job = self.nodes.job(*words, f"distributed.progress_timeout={self.progress}", *overrides, **environment)
        return self

    def until_the_fault(self) -> Trial:
        assert self.job.until(lambda: steps_taken(self.run) >= FAULT_STEP) and self.job.runs, self.job.outputs()
        self.fault_at = time.monotonic()
        return self

    def error(self, rank: int = 0) -> str:
        """The sentence with which a rank ends."""
        (sentence,) = (line for line in (self.fallen or self.job).stderr(rank).splitlines() if line.startswith("error: "))
        return sentence

    def again(self) -> None:
        """Say what rank 0 had logged when it ended, mend the network, and give the same command."""
        took, saved = time.monotonic() - self.fault_at, latest_step(self.run)
        print(
            f"\n{self.folder.name}: all ended {took:.0f} s after the fault, exit codes {self.job.codes}, step {saved} is saved;",
            "rank 0:",
        )
        print(*(line for line in self.job.stderr().splitlines() if line.startswith(("error: ", "warning: "))), sep="\n")
        self.nodes.switch.set(list(self.nodes.switch.links), loss=0.0, delay=0.0)
        self.fallen = self.job
        self.start()

    def goes_on_exactly(self, straight: Path) -> None:
        """The same command resumes from a checkpoint before the fault; images and losses are those of the undisturbed run."""
        if self.fallen is None:
            self.again()
        self.job.succeed()
        resumed = self.starts[-1].begins_after
        assert EVERY <= resumed < STEPS and f"from step {resumed}" in self.job.stdout()
        self.equals(straight)

    def equals(self, straight: Path) -> None:
        seen = what_the_weights_saw(self.run, self.starts, STEPS)
        assert seen == what_the_weights_saw(straight, [Start(0, 0, 2)], STEPS)
        losses, expected = ([row["loss"] for row in step_rows(run)] for run in (self.run, straight))
        # The number of processes decides how sums are rounded, nothing else does.
        assert losses == (expected if self.size == 2 else pytest.approx(expected, rel=1e-2))


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def straight(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, of two processes without nodes."""
    folder = tmp_path_factory.mktemp("straight")
    train(2, write_small_config(digits_shards, folder), folder / "run", *OPTIONS).succeed()
    return folder / "run"


@pytest.fixture
def trial(digits_shards: Path, tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    with ExitStack() as stack:
        yield lambda count=2, **more: Trial(stack.enter_context(running_nodes(count)), digits_shards, tmp_path, stack, **more)


def stalling_server(trial: Trial) -> subprocess.Popen:
    """The second node reads the shards from a server of its own."""
    server = subprocess.Popen(
        [*trial.nodes.nodes[1].inside, sys.executable, Path(__file__).with_name("stalling.py"), trial.shards],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    trial.stack.callback(lambda: (server.send_signal(signal.SIGCONT), server.kill(), server.communicate()))
    if server.stdout.readline() != "mounted\n":
        pytest.skip(f"cannot mount a folder here: {server.communicate()[1].strip()}")
    return server


@pytest.fixture(scope="module")
def quick(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory, stack: ExitStack) -> dict[str, Trial]:
    """One node is cut off, a process of another is killed, the file server of a third stops; all at the same time, to their ends."""
    names = ("cut", "killed", "stalled")
    trials = {
        name: Trial(stack.enter_context(running_nodes(2)), digits_shards, tmp_path_factory.mktemp(name), stack)
        for name in names
    }
    server = stalling_server(trials["stalled"])
    for each in trials.values():
        each.start()
    faults: dict[str, Callable[[Trial], object]] = {
        "cut": lambda trial: trial.nodes.switch.set(trial.nodes.switch.between(1), loss=1.0),
        "killed": lambda trial: trial.job.kill(1),
        "stalled": lambda _: server.send_signal(signal.SIGUSR1),
    }
    while faults:
        for name in [name for name in faults if steps_taken(trials[name].run) >= FAULT_STEP or not trials[name].job.runs]:
            faults.pop(name)(trials[name].until_the_fault())
        time.sleep(0.01)
    for name in ("killed", "cut", "stalled"):
        trials[name].job.wait()
        if name == "stalled":
            server.send_signal(signal.SIGCONT)
        trials[name].again()
    return trials


def test_a_node_that_is_cut_off(quick: dict[str, Trial], straight: Path) -> None:
    """Guards against a sentence that leaves open whether a process or its node was lost, and against steps done twice."""
    cut = quick["cut"]
    assert cut.fallen.codes == [RANK_LOST] * 2
    assert cut.error().startswith(f"error: rank 1 (host n1, pid {cut.fallen.pids[1]}) sent no heartbeat for ")
    assert "its node (10.77.0.2) does not answer either, n1 is down or the network to it is cut" in cut.error()
    assert "rank 0 (host n0" in cut.error(1) and "(10.77.0.1) does not answer" in cut.error(1)
    cut.goes_on_exactly(straight)


def test_a_process_that_is_killed(quick: dict[str, Trial], straight: Path) -> None:
    """Guards against a healthy node that is left out because one of its processes was killed."""
    killed = quick["killed"]
    assert killed.fallen.codes == [RANK_LOST, -signal.SIGKILL]
    assert "error: rank 1 (host n1" in killed.error() and "its node answers, so the process was killed" in killed.error()
    killed.goes_on_exactly(straight)


def test_a_file_server_that_stops(quick: dict[str, Trial], straight: Path) -> None:
    """Guards against half an hour of waiting for a file, and against an error that names neither it nor the node."""
    stalled = quick["stalled"]
    assert stalled.fallen.codes == [RANK_LOST] * 2
    for line in (stalled.error(), stalled.fallen.stderr().splitlines()[0]):
        assert f"rank 1 (host n1, pid {stalled.fallen.pids[1]}) has waited" in line
        assert f"for a read of {stalled.shards}/train-0" in line and ".tar at step " in line
    assert stalled.fallen.stderr().startswith("warning: ")
    stalled.goes_on_exactly(straight)


@pytest.mark.soak
@pytest.mark.parametrize("pair", [(0, 1), (1, 0)])
def test_one_way(pair: tuple[int, int], trial: Callable[..., Trial], straight: Path) -> None:
    """Guards against a node whose frames get lost in one direction only, with which both wait for ever."""
    half = trial().start().until_the_fault()
    half.nodes.switch.set([pair], loss=1.0)
    assert half.job.wait() == [RANK_LOST] * 2
    assert "error: rank 1 (host n1" in half.error() and "(10.77.0.2) does not answer either" in half.error()
    half.goes_on_exactly(straight)


@pytest.mark.soak
@pytest.mark.parametrize("back", [True, False])
def test_two_nodes_that_do_not_reach_each_other(back: bool, trial: Callable[..., Trial], straight: Path) -> None:
    """Guards against a run that waits half an hour, and ends without a name, because all reach rank 0, but two not each other."""
    apart = trial(4).start().until_the_fault()
    apart.nodes.switch.set(apart.nodes.switch.between(1, 2, back=back), loss=1.0)
    assert apart.job.wait() == [RANK_LOST] * 4
    assert time.monotonic() - apart.fault_at < BOUND
    one, other = re.search(r"\(host (n.), .* for an answer of (n.) \(10.77.0", apart.error()).groups()
    assert {one, other} == {"n1", "n2"} and "while both reach rank 0: mend the network between" in apart.error()
    assert apart.job.stderr().startswith("warning: rank ")
    apart.goes_on_exactly(straight)


@pytest.mark.soak
def test_lack_of_memory(trial: Callable[..., Trial], straight: Path) -> None:
    """Guards against a kernel's kill that looks like a lost node."""
    short = trial()
    with limited(short.nodes.nodes[1], "memory", bytes_=8 << 30) as group:
        short.start().until_the_fault()
        with short_of_memory(group):
            assert short.job.wait() == [RANK_LOST, -signal.SIGKILL]
        short.nodes.nodes[1].cgroups.clear()
    assert "(for lack of memory?)" in short.error() and "dmesg on n1" in short.error()
    short.goes_on_exactly(straight)


@pytest.mark.soak
def test_a_full_disk(trial: Callable[..., Trial], straight: Path, tmp_path: Path) -> None:
    """Guards against a save that fails on one node and is believed on the other."""
    with small_disk(tmp_path / "run" / "checkpoints"):  # first: nodes have the mounts of when they were made
        full = trial()
        full.start("checkpoint.retry_seconds=2", "checkpoint.keep_last=1").until_the_fault()
        filler = fill(full.run / "checkpoints")
        while full.job.runs and time.monotonic() < full.fault_at + PATIENCE:
            fill(full.run / "checkpoints")
            time.sleep(0.05)
        assert full.job.codes == [USER_ERROR] * 2 and "No space left on device" in full.error()
        filler.unlink()
        full.goes_on_exactly(straight)


@pytest.mark.soak
@pytest.mark.skipif(not refusing.compiler(), reason="needs a C compiler")
def test_a_clock_that_is_off(trial: Callable[..., Trial], straight: Path) -> None:
    """Guards against heartbeats, or anything that is trained, that depend on the clock of the day."""
    with refusing.preloaded(CLOCK):
        off = trial().start(PERVIT_CLOCK_OFF=["0", "7200"])
        off.job.succeed()
    assert "error" not in off.job.stderr() and [row["loss"] for row in step_rows(off.run)] == [
        row["loss"] for row in step_rows(straight)
    ]


@pytest.mark.soak
def test_an_interface_that_leads_nowhere(trial: Callable[..., Trial]) -> None:
    """Guards against half an hour of waiting where the network's interface was named wrongly."""
    lost = trial()
    for node in lost.nodes.nodes:
        node.do("ip", "tuntap", "add", "eth1", "mode", "tap")
        node.do("ip", "address", "add", f"10.78.{node.number}.1/24", "dev", "eth1")
        node.do("ip", "link", "set", "eth1", "up")
    lost.start(GLOO_SOCKET_IFNAME="eth1")
    assert lost.job.until(lambda: RANK_LOST in lost.job.codes)
    sentence = lost.error(lost.job.codes.index(RANK_LOST))  # of who connects; the other one listens
    assert "cannot connect to the others" in sentence and "GLOO_SOCKET_IFNAME" in sentence
    lost.job.kill()  # as launchers do
    lost.job.wait()


@pytest.mark.soak
def test_a_late_rank(trial: Callable[..., Trial], straight: Path) -> None:
    """Guards against a start that waits without a word, and against one that does not wait for a slow node."""
    late = trial().start()
    late.job.signal(signal.SIGSTOP, 1)
    assert late.job.until(lambda: "rank 0 has waited 20 s for rank 1 of 2 ranks" in late.job.stderr())
    late.job.signal(signal.SIGCONT, 1)
    late.job.succeed()
    late.equals(straight)


@pytest.mark.soak
def test_a_slow_node(trial: Callable[..., Trial], straight: Path) -> None:
    """Guards against a slow node, or a slow and lossy network, that is taken for a lost one, or changes what is computed."""
    slow = trial()
    with limited(slow.nodes.nodes[1], "cpu", cores=0.3):
        slow.start().until_the_fault()
        slow.nodes.switch.set(slow.nodes.switch.between(1), delay=0.02, loss=0.01, bandwidth=20e6)
        slow.job.succeed()
    named = re.search(r"rank 1 on n1 costs \d+% of the step .*", slow.job.stdout())
    assert named, slow.job.stdout()
    print(named[0])
    slow.equals(straight)
