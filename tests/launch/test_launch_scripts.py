"""What the scripts of ``launch/`` say, and what they give to a training; without Slurm and without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.launch_scripts import NOTE, copied_scripts, launch, the_sentence, write_python
from support.launching import REPOSITORY, clean_environment

SCRIPTS = sorted(path.name for path in (REPOSITORY / "launch").glob("*.slurm")) + [
    "demo.sh",
    "local.sh",
    "local_cluster.sh",
    "sweep.sh",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help(script: str, word: str) -> None:
    """Guards against a question that is answered as a mistake, or that starts something."""
    result = launch(script, word)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(re.findall(rf"^  .*launch/{script}\b", result.stdout, re.MULTILINE)) >= 2, "two examples"
    assert "#SBATCH" not in re.sub(r"the #SBATCH lines", "", result.stdout) and "set -" not in result.stdout


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_of_what_is_sourced(word: str) -> None:
    """Guards against the same of the part that the job scripts share, whose own examples are theirs."""
    result = launch("train_job.sh", word)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("launch/train_job.sh CONFIG") and "launch/train.slurm" in result.stdout
    assert "fail()" not in result.stdout


@pytest.mark.parametrize(
    ("word", "said"), [("--hepl", "unrecognized arguments: --hepl"), ("train.epoch=1", "did you mean 'train.epochs'?")]
)
def test_a_mistake_in_the_demo(word: str, said: str) -> None:
    """Guards against minutes of training after a mistyped option."""
    result = launch("demo.sh", word)
    assert (result.returncode, result.stdout) == (2, "") and said in result.stderr


@pytest.mark.parametrize("module", ["toyy", "package", "package.toyy", "no_package.toy", "toy.py", "./toy.py", "package/toy"])
def test_no_such_module(module: str, tmp_path: Path) -> None:
    """Guards against "No module named ..." in Python's words, once for every rank."""
    (tmp_path / "package").mkdir()
    for name in ("toy.py", "package/__init__.py", "package/toy.py"):
        (tmp_path / name).write_text(NOTE)
    sentence = the_sentence(launch("local.sh", "2", "--", module, cwd=tmp_path))
    assert sentence.startswith(f"error: '{module}' is not a module that 'python -m' can run in {tmp_path}; ")


def test_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    """Guards against a module that is there and is called missing, for what it imports is."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import packages_of_others\n")
    (tmp_path / "package" / "toy.py").touch()
    result = launch("local.sh", "1", "--", "package.toy", cwd=tmp_path)
    assert result.returncode == 1 and "No module named 'packages_of_others'" in result.stderr, result


def test_no_temporary_folder(tmp_path: Path) -> None:
    """Guards against files of the ranks at the root of the disk, where an unchecked mktemp once put them."""
    sentence = the_sentence(launch("local.sh", "2", "--", "toy", cwd=tmp_path, TMPDIR=str(tmp_path / "missing")))
    assert (
        sentence.startswith(f"error: cannot create a folder for the ranks' messages in {tmp_path}/missing; ")
        and "set TMPDIR" in sentence
    )


@pytest.mark.parametrize(
    ("name", "value"), [("SLURM_RESTART_COUNT", "x"), ("SLURM_CPUS_PER_TASK", "abc"), ("SLURM_JOB_ID", "-1")]
)
def test_not_slurms_environment(name: str, value: str) -> None:
    """Guards against arithmetic in bash's words, and a job that is requeued for a mistake in its environment."""
    variables = {"SLURM_JOB_ID": "7", "PERVIT_ROOT": str(REPOSITORY), name: value}
    sentence = the_sentence(launch("train.slurm", "configs/demo.yaml", **variables))
    assert sentence == f"error: {name} must be a whole number, got '{value}'; Slurm sets it, so unset it."


@pytest.mark.parametrize("config", ["configs/convit_s.yaml", "convit_s", "convit_s.yaml", "ablations/pervit_table5_lrn"])
def test_a_job_takes_what_the_training_takes_for_a_config(config: str) -> None:
    """Guards against a config's name that works on one machine and is refused by the job script."""
    sentence = the_sentence(launch("train.slurm", config, PERVIT_ROOT=str(REPOSITORY)))
    assert sentence.startswith("error: this script must run in a Slurm job"), "the check that follows"


@pytest.mark.parametrize("words", [[], ["convit_z"], ["train.epochs=1"]])
def test_a_job_without_a_config(words: list[str]) -> None:
    """Guards against a mistake that every task of the job answers, or bash."""
    sentence = the_sentence(launch("train.slurm", *words, PERVIT_ROOT=str(REPOSITORY)))
    assert (
        sentence.startswith(f"error: the first word must be a config file or a name in configs/, got '{''.join(words)}'")
        and "a name in configs/" in sentence
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return copied_scripts(tmp_path)


# ---- what a job script gives to the training ---------------------------------------------------


NOTES = (
    "import json, sys\n"
    "with open('notes', 'a') as file:\n    print(json.dumps([__spec__.name, *sys.argv[1:]]), file=file)\n"
    "sys.exit({code})\n"
)
SCONTROL = """case "$*" in
  "show hostnames"*) echo node1 ;;
  "show job"*) echo "JobId=7 ${STATE:-JobState=RUNNING} Restarts=0 Requeue=1" ;;
  *) echo "$*" >> requeued ;;
esac"""


def submit(root: Path, *words: str, code: int = 75, **variables: str) -> list[list[str]]:
    """What a job of one task starts, each with its words: a training that ends with ``code``, and the question whether it may go on.

    In Slurm's place are a ``srun`` that runs the command here and a ``scontrol`` that agrees; test_slurm.py has the real ones.
    """
    (root / "pipeline" / "training").mkdir(parents=True)
    for name, text in (
        ("__init__", ""),
        ("train", NOTES.format(code=code)),
        ("training/__init__", ""),
        ("training/restart", NOTES.format(code=0)),
    ):
        (root / "pipeline" / f"{name}.py").write_text(text)
    bin_folder = root / "slurm"
    bin_folder.mkdir()
    for name, text in (("srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'), ("scontrol", SCONTROL)):
        (bin_folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "name"}
    path = f"{bin_folder}:{clean_environment()['PATH']}"
    result = launch(root / "launch" / words[0], *words[1:], cwd=root, **{**slurm, "PATH": path, **variables})
    assert result.returncode == code, result
    return [json.loads(line) for line in (root / "notes").read_text().splitlines()]


ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "4"}


@pytest.mark.parametrize(
    ("script", "variables", "folders"),
    [
        ("train.slurm", {}, []),
        ("train.slurm", {"PERVIT_OUTPUT": "/a b/%a"}, ["output_dir=/a b/%a"]),
        ("train.slurm", {"PERVIT_OUTPUT": "/a b/%a", **ARRAY}, ["output_dir=/a b/4"]),
        ("train.slurm", {"PERVIT_OUTPUT": "", "PERVIT_DATA": "/d %a", **ARRAY}, ["data.path=/d %a"]),
        ("pervit_s.slurm", {}, ["data.path=data/imagenet", "output_dir=runs/name"]),
        ("pervit_s.slurm", ARRAY, ["data.path=data/imagenet", "output_dir=runs/name_4"]),
        ("pervit_s.slurm", {"PERVIT_OUTPUT": "/a b", "PERVIT_DATA": "/d"}, ["data.path=/d", "output_dir=/a b"]),
    ],
)
def test_the_folders_of_a_job(script: str, variables: dict, folders: list[str], repository: Path) -> None:
    """Guards against PERVIT_OUTPUT that is ignored, split at a space, stronger than the command line, or another after a requeue."""
    config = [] if script != "train.slurm" else ["launch/train_job.sh"]  # any file: the note does not read it
    words = ["--config", *(config or ["configs/pervit_s.yaml"]), *folders, "seed=1"]
    asked = submit(repository, script, *config, "seed=1", **variables)
    assert asked == [["pipeline.train", *words], ["pipeline.training.restart", "--exit-code", "75", *words]]
    assert (repository / "requeued").read_text() == f"requeue {'5_4' if 'SLURM_ARRAY_JOB_ID' in variables else '7'}\n"


# ---- the job script, up to srun ---------------------------------------------------------------


def start_job(repository: Path, *first_on_path: Path, nodes: int = 1, **variables: str) -> subprocess.CompletedProcess:
    """``train.slurm`` as a job of so many nodes, with an ``srun`` that leaves its environment in a file."""
    slurm = write_python(repository.parent / "slurm", f'exec "{sys.executable}" "{repository}/note.py" "$@"', "srun")
    write_python(slurm, "echo node1; echo node2", "scontrol")
    names = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NNODES": str(nodes), "SLURM_JOB_NODELIST": f"node[1-{nodes}]"}
    path = ":".join(map(str, [*first_on_path, slurm, Path(sys.executable).parent, "/usr/bin", "/bin"]))
    return launch(repository / "launch" / "train.slurm", "note.py", cwd=repository, **{**names, "PATH": path, **variables})


def srun_words(repository: Path, **variables: str) -> list[str]:
    """What ``train.slurm`` gives to srun."""
    result = start_job(repository, **variables)
    assert result.returncode == 0, result.stderr
    return json.loads((repository / "note").read_text())["arguments"]


@pytest.mark.parametrize(("nodes", "address"), [(1, "127.0.0.1"), (2, "node1")])
def test_where_the_tasks_of_a_job_meet(nodes: int, address: str, repository: Path) -> None:
    """Guards against a job on one node that other machines can reach, and one on several whose nodes cannot reach each other."""
    result = start_job(repository, nodes=nodes)
    note = json.loads((repository / "note").read_text())
    assert (result.returncode, note["MASTER_ADDR"]) == (0, address), result.stderr
    assert f"meeting at {address}:20007" in result.stdout
    assert re.fullmatch("[0-9a-f]{64}", note["PERVIT_JOB_SECRET"])


def test_a_job_without_a_secret(repository: Path, tmp_path: Path) -> None:
    """Guards against tasks that start without the secret by which they know each other's messages."""
    broken = write_python(tmp_path / "broken", "echo 00", "od")
    assert "od must give 32 random bytes" in the_sentence(start_job(repository, broken))
    assert not (repository / "note").exists()


@pytest.mark.parametrize(
    ("slurm", "cpus"),
    [
        ({"SLURM_JOB_CPUS_PER_NODE": "192(x2),128", "SLURM_TASKS_PER_NODE": "8(x3)"}, 16),
        ({"SLURM_JOB_CPUS_PER_NODE": "96", "SLURM_TASKS_PER_NODE": "3,8(x2)"}, 12),
        ({"SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "8"}, 1),
        ({"SLURM_JOB_CPUS_PER_NODE": "192", "SLURM_TASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "3"}, 3),
    ],
)
def test_the_tasks_share_all_cpus_of_a_node(
    slurm: dict[str, str], cpus: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ranks with 4 cores beside idle ones, and tasks that ask for more than the smallest node has."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # a site's own value would be kept
    words = srun_words(repository, **slurm)
    assert [word for word in words if word.startswith("--cpus-per-task")] == [f"--cpus-per-task={cpus}"]
    assert json.loads((repository / "note").read_text())["OMP_NUM_THREADS"] == str(cpus)
    assert "--distribution=block:block" in words


@pytest.mark.parametrize(("gpus", "bound"), [({}, []), ({"SLURM_GPUS_ON_NODE": "8"}, ["--gpu-bind=none", "--cpu-bind=none"])])
def test_ranks_see_all_gpus(gpus: dict[str, str], bound: list[str], repository: Path) -> None:
    """Guards against NCCL without direct copies between GPUs, and against CPU jobs that lose Slurm's own binding."""
    assert [word for word in srun_words(repository, **gpus) if "-bind=" in word] == bound


def test_words_for_a_container(repository: Path) -> None:
    """Guards against a container's options that are lost or torn apart, and the host's Python in front of the container's."""
    shutil.rmtree(repository / ".venv")
    write_python(repository / ".venv" / "bin", "exit 1")
    (repository / ".venv" / "bin" / "activate").write_text("PATH=$PWD/.venv/bin:$PATH; MARK=host; export MARK PATH")
    words = srun_words(repository, PERVIT_SRUN="--container-mounts='/a b:/a',/c:/c  apptainer exec -e img.sif")
    start = words.index("python")
    assert words[start - 5 : start] == ["--container-mounts=/a b:/a,/c:/c", "apptainer", "exec", "-e", "img.sif"]
    assert "MARK" not in json.loads((repository / "note").read_text())
    sentence = the_sentence(start_job(repository, PERVIT_SRUN="--container-mounts='/a b"))
    assert sentence.startswith("error: PERVIT_SRUN must have closed quotes, got '--container-mounts='/a b'")


@pytest.mark.parametrize(("restarts", "requeued"), [("2", True), ("3", False)])
def test_a_container_that_cannot_be_asked_any_more(restarts: str, requeued: bool, repository: Path) -> None:
    """Guards against a job that ends for good at its time limit, where Slurm starts no step, and one that goes on for ever."""
    past = {"STATE": "JobState=COMPLETING Reason=TimeLimit", "SLURM_RESTART_COUNT": restarts, "PERVIT_SRUN": "env A=b"}
    started = submit(repository, "train.slurm", "launch/train_job.sh", code=143, **past)
    assert [each[0] for each in started] == ["pipeline.train"]
    assert (repository / "requeued").exists() == requeued
