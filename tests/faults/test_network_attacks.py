"""Strangers on the network, as real processes: they run nothing, they end nothing, and what they did is named."""

from __future__ import annotations

import ast
import ipaddress
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.folder import latest_step
from pipeline.cluster.beats import Beat, Board, Status
from pipeline.cluster.environment import job_secret
from pipeline.cluster.rendezvous import _proof, prove_membership
from pipeline.cluster.world import World
from pipeline.errors import PREEMPTED, RANK_LOST, USER_ERROR, UserError, printable
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import Job, meeting_point, steps_taken
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

STRANGER = REPOSITORY / "tests" / "faults" / "stranger.py"
OVERWRITTEN = ("heartbeat/0", "heartbeat/1")  # keys of the job's store


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("pickle", r"error: a message must be JSON, got b'\\x80.* from rank 1"),
        ("json", "error: the process that came as rank 1 must know the secret of this job and does not"),
    ],
)
def test_a_stranger_in_place_of_a_rank_runs_nothing(how: str, sentence: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against a pickle from the network that rank 0 reads, and so runs, and against a run with a member who is not of the job."""
    ran = tmp_path / "ran"
    rank_0 = Job(1, "--config", small_run, missing=1)
    stranger = subprocess.Popen(
        [sys.executable, STRANGER, how, str(rank_0.port), ran],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        (code,) = rank_0.wait(PATIENCE)
    finally:
        stranger.kill()
    assert "joined as rank 1" in stranger.communicate()[0]
    assert code == USER_ERROR, rank_0.outputs()
    assert re.search(sentence, rank_0.stderr()) and "Traceback" not in rank_0.stderr()
    assert not ran.exists()


@dataclass
class Attacked:
    """A training on which a stranger worked."""

    listening: set[str]  # addresses
    code: int
    errors: str
    steps: list[int]
    saved: int | None  # step of the last checkpoint
    stranger: str  # its output
    secret: str


@pytest.fixture(scope="module")
def attacked(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """Two processes by ``launch/local.sh``; while they train, a stranger overwrites what they say to each other. Then SIGTERM."""
    from support.runs import write_small_config

    folder = tmp_path_factory.mktemp("attacked")
    run, mark = folder / "run", secrets.token_hex(8)
    errors, enough = folder / "errors", folder / "enough"
    command = ["launch/local.sh", "2", "--", "pipeline.train", "--config", write_small_config(digits_shards, folder)]
    overrides = [f"output_dir={run}", "log.samples=true", *SMALL_MODEL]
    with errors.open("wb") as file:
        launcher = subprocess.Popen(
            [*command, *overrides], cwd=REPOSITORY, env=clean_environment(MARK=mark), stdout=subprocess.DEVNULL, stderr=file,
        )  # fmt: skip
    stranger = None
    try:
        deadline = time.monotonic() + PATIENCE
        while steps_taken(run) < 2:
            assert launcher.poll() is None and time.monotonic() < deadline, errors.read_text()
            time.sleep(0.05)
        ranks = {each["RANK"]: pid for pid, each in _environments() if each.get("MARK") == mark and "RANK" in each}
        told = dict(_environments())[ranks["0"]]
        listening = {
            connection.laddr.ip
            for pid in ranks.values()
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        }
        stranger = subprocess.Popen(
            [sys.executable, STRANGER, "overwrite", told["MASTER_PORT"], enough],
            env=clean_environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        # A rank writes its heartbeat anew every second, so that the others may see the stranger's only after several.
        while launcher.poll() is None and time.monotonic() < deadline and not any(_warned(errors, key) for key in OVERWRITTEN):
            time.sleep(0.05)
        enough.touch()
        turns, _ = stranger.communicate(timeout=PATIENCE)
        goal = steps_taken(run) + 3
        while steps_taken(run) < goal and launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        launcher.terminate()
        launcher.wait(PATIENCE)
    finally:
        if stranger is not None:
            stranger.kill()
        launcher.terminate()
        launcher.wait(PATIENCE)
    steps = [row["step"] for row in step_rows(run)]
    yield Attacked(
        listening, launcher.returncode, errors.read_text(), steps, latest_step(run), turns, told["PERVIT_JOB_SECRET"]
    )


def _warned(errors: Path, key: str) -> int:
    """How often the run has said so far that ``key`` is not its own."""
    return errors.read_text().count(f"warning: {key} in the job's store at 127.0.0.1:")


def _environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Of all processes that may be looked at."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(path.parent.name), dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_a_run_on_one_machine_listens_on_loopback_alone(attacked: Attacked) -> None:
    """Guards against a store or a connection that other machines reach although nobody there takes part."""
    assert attacked.listening, "the ranks were not found"
    assert [address for address in attacked.listening if not ipaddress.ip_address(address).is_loopback] == []


def test_a_run_outlives_what_a_stranger_writes(attacked: Attacked) -> None:
    """Guards against a stranger who ends a run, even as if it were done, and against terminal escapes of his in the log."""
    assert re.fullmatch(r"\d+ turns\n", attacked.stranger) and int(attacked.stranger.split()[0]) >= 3
    assert attacked.code == PREEMPTED, attacked.errors  # it went on until it was asked to stop
    assert attacked.steps == list(range(1, attacked.saved + 1))
    # Who reads right after the other's write never sees what the stranger wrote; that cannot be so for both.
    warned = [attacked.errors.count(f"warning: {key} in the job's store at 127.0.0.1:") for key in OVERWRITTEN]
    assert sorted(warned) in ([0, 1], [1, 1])
    assert "\x1b" not in attacked.errors and attacked.secret not in attacked.errors


@pytest.mark.long
def test_a_forgery_that_is_valid_ends_a_run_but_not_as_if_it_were_done(tmp_path: Path) -> None:
    """Guards against a stranger whose exit code or terminal escapes the ranks pass on."""
    meeting = meeting_point(2)
    environment = {**meeting, "LOCAL_WORLD_SIZE": 2, "PYTHONPATH": f"{REPOSITORY}:{STRANGER.parent}", "OMP_NUM_THREADS": 1}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "ring", "100000", "none", "1", tmp_path], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
            env=clean_environment(**{name: str(value) for name, value in {**environment, "RANK": rank, "LOCAL_RANK": rank}.items()}),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while not (tmp_path / "1.at").exists() or int((tmp_path / "1.at").read_text().split()[1]) < 30:
            assert time.monotonic() < deadline and not any(rank.poll() for rank in ranks)
            time.sleep(0.05)
        command = [sys.executable, STRANGER, "end", str(meeting["MASTER_PORT"]), "-"]
        subprocess.run(command, env=clean_environment(), stderr=subprocess.DEVNULL, timeout=PATIENCE)
        errors = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == USER_ERROR and ranks[1].returncode in (USER_ERROR, RANK_LOST)
    assert errors[0] == "error: rank 1 (host stranger, pid 1) ended at step 1, training: all is well ?[2J?]0;owned?.\n"
    assert "\x1b" not in errors[1]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_only_valid_heartbeats_count(store: dist.TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a message that ends a run as if it were finished, a traceback over one, and control characters in the log."""
    main, other = Board(store), Board(store)

    def seen() -> tuple[int, str]:
        (beat,) = main.read([1])
        return beat.number, beat.message

    assert seen() == (0, "")  # nobody has written: no wait
    other.write(Beat(1, number=4, message="four"))
    assert seen() == (4, "four")
    forged = [Beat(1, number=9, status=Status.ENDED, exit_code=code).to_json() for code in (0, 75, -1, 2**63)]
    wrong = ["[]", "null", "9" * 5000, "[" * 5000, Beat(2, number=9).to_json(), Beat(1, number=9, hanging=(-1,)).to_json()]
    wrong += [
        Beat(1, number=True).to_json(),
        Beat(1, number=9, status="done").to_json(),
        Beat(1, number=9, hanging=("a",)).to_json(),
    ]
    for note in (*forged, *wrong, b"", b"\xff" * 10**6, b" " * 10**5 + Beat(1, number=9).to_json().encode()):
        store.set("heartbeat/1", note)
        assert seen() == (4, "four"), note
    other.write(Beat(1, number=6, message="a\x1b[2J\nb", host="h\x07", doing="x" * 200))
    assert seen() == (6, "a?[2J?b") and len(main.read([1])[0].doing) == 100
    assert capfd.readouterr().err.count("warning: heartbeat/1 in the job's store") == 1
    for code in (2, 76, 130):
        verdict = Beat(0, number=1, status=Status.VERDICT, message="because", exit_code=code, hanging=(1, 2))
        main.write(verdict)
        assert other.read([0]) == [verdict]
    assert printable("\x1b[31mred\u202e\n", 20) == "?[31mred??" and printable("x" * 30, 10) == "xxxxxxx..."


def test_a_proof_of_membership_is_of_one_rank_and_one_start() -> None:
    """Guards against a stranger who repeats what a rank has sent in this start or in an earlier one."""
    secret = secrets.token_bytes(32)
    proofs = {_proof(secret, 1, "a"), _proof(secret, 2, "a"), _proof(secret, 1, "b"), _proof(secrets.token_bytes(32), 1, "a")}
    assert len(proofs) == 4 and all(len(proof) == 64 for proof in proofs)


@pytest.mark.parametrize("value", ["", "f" * 63, "F" * 64, "g" * 64, "0x" + "f" * 62])
def test_a_secret_is_whole(value: str) -> None:
    """Guards against a job that goes on unprotected, or prints the secret that it was given."""
    with pytest.raises(
        UserError, match=r"PERVIT_JOB_SECRET must be .* 64 hexadecimal digits.*launch/local.sh or sbatch"
    ) as error:
        job_secret(value)
    assert not value or value not in str(error.value)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_gathered_is_plain_data(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against data that arrives as something else than was sent, and against a traceback over what is not data."""
    world = World(0, 1, torch.device("cpu"), 1)
    prove_membership(secrets.token_bytes(32), world)
    value = {"a": [1, 2.5, None, True, float("inf")], "Φ\x00\ud800": {"b": "c" * 100_000}}
    assert world.gather(value) == [value]
    for unfit in ({1: "a"}, [{"a": {2: 3}}], {1, 2}, torch.zeros(1)):
        with pytest.raises(TypeError):
            world.gather(unfit)
    monkeypatch.setattr("pipeline.cluster.world.LARGEST", 1000)
    with pytest.raises(UserError, match="a message must have 1 to 1000 bytes, got one of 2002 bytes from rank 0"):
        world.gather("x" * 2000)
    for sent in (b"\x80\x04K\x01.", b"[" * 900, b"nul", b"\xff"):
        monkeypatch.setattr("pipeline.cluster.world.json.dumps", lambda value, sent=sent: _Bytes(sent))
        with pytest.raises(UserError, match="a message must be JSON, got b'.*from rank 0"):
            world.gather(None)


class _Bytes:
    """What a stranger sends instead of text."""

    def __init__(self, data: bytes) -> None:
        self.encode = lambda: data


def test_no_call_of_the_package_pickles() -> None:
    """Guards against an object that crosses the network or comes from a file as a pickle, which would run what a stranger wrote."""
    forbidden = {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
        "send_object_list",
        "recv_object_list",
    }
    own_child = REPOSITORY / "pipeline" / "loader" / "probe.py"  # asks a process that it has started, through a pipe
    found = []
    for path in sorted({*(REPOSITORY / "pipeline").rglob("*.py")} - {own_child}):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                found += [where for name in names if name in {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}]
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                found += [where] if name in forbidden else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "numpy.load", "np.load"}:
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                safe = (
                    given.get("weights_only") == "True"
                    if "torch" in ast.unparse(node.func)
                    else given.get("allow_pickle", "False") == "False"
                )
                found += [] if safe else [where]
    assert found == []
