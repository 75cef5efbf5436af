"""``PERVIT_CONTAINER``: the commands that job scripts make of an image's name, and the recipes of images.

In the places of srun and Apptainer stand scripts that write down their words and run the command, as those would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment

NOTE = (
    "import json, os, signal, sys\n"
    "with open('note', 'w') as file:\n    json.dump({'arguments': sys.argv[1:], 'cwd': os.getcwd()}, file)\n"
)
# Options up to the program, which is run: a container has no other way to run it.
STAND_IN = """#!{python}
import json, os, sys
words = sys.argv[1:]
if words == ["--help"]:
    print("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH" if {pyxis} else "      --container=path")
    sys.exit()
with open({record!r}, "w") as file:
    json.dump(words, file)
start = next(place for place, word in enumerate(words) if word in ("python", {runtime!r}) or word.endswith("/apptainer"))
os.execvp(words[start], words[start:])
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the scripts, a module instead of the training, and images."""
    root = tmp_path / "a repository"
    shutil.copytree(REPOSITORY / "launch", root / "launch")
    (root / "pipeline").mkdir()
    (root / "pipeline" / "__init__.py").touch()
    (root / "pipeline" / "train.py").write_text(NOTE)
    (root / "config.yaml").touch()
    for name in ("pervit.sif", "pervit.sqsh"):
        (tmp_path / name).touch()
    return root


def start_job(
    repository: Path, *words: str, pyxis: bool = False, apptainer: bool = False, **variables: str
) -> subprocess.CompletedProcess:
    """``train.slurm`` on a node with pyxis, Apptainer, both or neither, and without a Python beside that of the container."""
    tools = repository.parent / "tools"
    shutil.rmtree(tools, ignore_errors=True)
    tools.mkdir()
    for name, there in (("srun", True), ("apptainer", apptainer)):
        if there:
            fields = {"python": sys.executable, "pyxis": pyxis, "record": str(repository / name), "runtime": "apptainer"}
            (tools / name).write_text(STAND_IN.format(**fields))
            (tools / name).chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node1"}
    return subprocess.run(
        ["bash", str(repository / "launch" / "train.slurm"), "config.yaml", *words],
        cwd=repository,
        env={**clean_environment(**job, **variables), "PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def words_of(repository: Path, program: str) -> list[str]:
    return json.loads((repository / program).read_text())


def test_pyxis(repository: Path, tmp_path: Path) -> None:
    """Guards against shards and run folders that are not in the container, and a command that it runs elsewhere."""
    data, output = tmp_path / "shards", tmp_path / "not yet" / "run"
    data.mkdir()
    (repository / "data").symlink_to(data)
    result = start_job(
        repository,
        f"output_dir={output}",
        pyxis=True,
        PERVIT_CONTAINER=f"{tmp_path}/pervit.sqsh",
        PERVIT_DATA="data",
        PERVIT_MOUNTS="/scratch,/raw:/images:ro",
    )
    assert result.returncode == 0, result.stderr
    words = words_of(repository, "srun")
    mounts = f"{repository}:{repository},{data}:{data},{tmp_path}:{tmp_path},/scratch:/scratch,/raw:/images:ro"
    container = [
        f"--container-image={tmp_path}/pervit.sqsh",
        f"--container-mounts={mounts}",
        f"--container-workdir={repository}",
    ]
    start = words.index("python")
    assert words[start - 4 : start] == [*container, "--no-container-entrypoint"]
    note = json.loads((repository / "note").read_text())
    assert note["cwd"] == str(repository) and note["arguments"][:3] == ["--config", "config.yaml", "data.path=data"]


def test_apptainer(repository: Path, tmp_path: Path) -> None:
    """Guards against a container without the GPUs, and a path with a space that falls apart."""
    shards = tmp_path / "my shards"
    shards.mkdir()
    result = start_job(repository, apptainer=True, PERVIT_CONTAINER=f"{tmp_path}/pervit.sif", PERVIT_DATA=str(shards))
    assert result.returncode == 0, result.stderr
    words = words_of(repository, "apptainer")
    bind = f"{repository}:{repository},{shards}:{shards}"
    assert words[:7] == ["exec", "--nv", "--bind", bind, "--pwd", str(repository), f"{tmp_path}/pervit.sif"]
    assert words[7:11] == ["python", "-u", "-m", "pipeline.train"]
    assert json.loads((repository / "note").read_text())["arguments"][2] == f"data.path={shards}"


@pytest.mark.parametrize(
    ("image", "pyxis", "apptainer", "expected"),
    [
        ("ghcr.io/me/pervit:1", True, True, "--container-image=ghcr.io/me/pervit:1"),
        ("ghcr.io/me/pervit:1", False, True, "docker://ghcr.io/me/pervit:1"),
        ("nvcr.io#nvidia/pytorch:26.01-py3", True, False, "--container-image=nvcr.io#nvidia/pytorch:26.01-py3"),
        ("docker://me/pervit", True, True, "docker://me/pervit"),
        ("oras://ghcr.io/me/pervit:sif", False, True, "oras://ghcr.io/me/pervit:sif"),
    ],
)
def test_the_name_and_the_node_choose(image: str, pyxis: bool, apptainer: bool, expected: str, repository: Path) -> None:
    """Guards against an image that the other runtime would have run."""
    result = start_job(repository, pyxis=pyxis, apptainer=apptainer, PERVIT_CONTAINER=image)
    assert result.returncode == 0, result.stderr
    assert expected in words_of(repository, "srun")


@pytest.mark.parametrize(
    ("image", "more", "sentence"),
    [
        ("me/pervit", {}, "srun has no --container-image (pyxis), and neither apptainer nor singularity is on the PATH"),
        ("{}/pervit.sif", {}, "requires Apptainer, but neither apptainer nor singularity is on the PATH; load its module"),
        ("{}/pervit.sqsh", {}, "requires pyxis, but srun has no --container-image here"),
        ("{}/other.sif", {}, "build it as launch/container/ says"),
        ("{}/pervit.sif", {"PERVIT_SRUN": "env A=b"}, "PERVIT_CONTAINER and PERVIT_SRUN must not both be set"),
    ],
    ids=["neither", "no Apptainer", "no pyxis", "no file", "both"],
)
def test_mistakes(image: str, more: dict[str, str], sentence: str, repository: Path, tmp_path: Path) -> None:
    """Guards against "command not found" of every task, and a training outside of the container that was asked for."""
    result = start_job(repository, PERVIT_CONTAINER=image.format(tmp_path), **more)
    assert result.returncode == 2 and not (repository / "srun").exists(), result
    (said,) = result.stderr.splitlines()
    assert said.startswith("error: PERVIT_CONTAINER") and sentence in said


def test_both_recipes_have_the_same_steps() -> None:
    """Guards against an Apptainer image that lacks what Docker's has: base, files, steps."""
    folder = REPOSITORY / "launch" / "container"
    docker, apptainer = (folder / "Dockerfile").read_text(), (folder / "pervit.def").read_text()
    assert re.search(r"^ARG PERVIT_BASE=(\S+)$", docker, re.M)[1] == re.search(r"^From: (\S+)$", apptainer, re.M)[1]  # type: ignore[index]
    assert "FROM ${PERVIT_BASE}" in docker.splitlines()
    steps = r"install\.sh (system|packages|project)\b"
    assert re.findall(steps, docker) == re.findall(steps, apptainer) == ["system", "packages", "project"]
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", docker, re.M) for word in line.split()}
    assert copied == set(re.findall(r"^    (\S+) /opt/pervit/", apptainer, re.M))
    allowed = {line[1:] for line in (folder / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed and all((REPOSITORY / name).exists() for name in copied)
    assert (
        re.search(r"^USER \d+$", docker, re.M)
        and 'ENTRYPOINT ["/usr/bin/tini", "--"]' in docker
        and "tini" in (folder / "install.sh").read_text()
    )


def test_the_recipes_list_of_packages(tmp_path: Path) -> None:
    """Guards against an image without a dependency, by the list that the recipe gives to pip."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(sys.executable)
    (venv / "pip").write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\nfor word; do last=$word; done; cp "$last" {tmp_path}/list\n'
    )
    (venv / "pip").chmod(0o755)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "python3").write_text("#!/bin/sh\n")  # makes no environment
    (tmp_path / "tools" / "python3").chmod(0o755)
    variables = {"PATH": f"{tmp_path}/tools:/usr/bin:/bin", "PERVIT_VENV": str(venv.parent), "PERVIT_EXTRAS": "insight wandb"}
    script = REPOSITORY / "launch" / "container" / "install.sh"
    subprocess.run([script, "packages"], cwd=tmp_path, env={**os.environ, **variables}, check=True)
    listed = (tmp_path / "list").read_text()
    assert all(re.search(rf"^{name}[<>=]", listed, re.M) for name in ("torch", "deepspeed", "plotly", "wandb"))
    assert "scikit-learn" not in listed and "--constraint constraints.txt" in (tmp_path / "words").read_text()
