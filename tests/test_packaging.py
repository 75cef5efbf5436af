"""What others install: versions, commands, configs inside the package, make's targets, licence and citation."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module, metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.config import find_recipe, load_config, shipped_recipes
from pipeline.errors import UserError
from support.launching import PATIENCE, REPOSITORY, clean_environment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(text) for text in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])]


def constraints() -> dict[str, str]:
    """Package -> its one version."""
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_the_tested_version_lies_in_a_range_with_two_ends(requirement: Requirement) -> None:
    """Guards against a range that shuts out the version that is tested, and one that lets in every future major version."""
    assert requirement.specifier.contains(constraints()[canonicalize_name(requirement.name)])
    assert {specifier.operator for specifier in requirement.specifier} == {">=", "<"}


def test_constraints_name_everything_that_is_pulled_in() -> None:
    """Guards against a package whose version `make install` leaves to the day, as nvidia-nvjpeg's once was."""
    pinned, seen, todo = constraints(), set(), [requirement.name for requirement in DIRECT]
    extras = (
        PROJECT["optional-dependencies"][extra]
        for extra in ("detection", "docs", "hub", "mlflow", "onnx", "remote", "timm", "trackio", "wandb")
    )  # not by `make install`
    not_installed = {Requirement(text).name for text in sum(extras, [])}
    assert not_installed <= pinned.keys()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in seen or name in not_installed or name == "nvidia-dali-cuda120":  # not beside the other DALI
            continue
        seen.add(name)
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            extras = ["", "all"] if name.startswith("nvidia-nvimgcodec") else [""]  # DALI asks for nvimgcodec[all]
            if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            if name != "torch" or not re.match(
                "nvidia|cuda|triton", needed.name
            ):  # torch names its CUDA libraries' versions itself
                todo.append(needed.name)
    assert len(seen) > 50
    assert seen - pinned.keys() == set()


def test_triton_is_the_version_that_pytorch_names() -> None:
    """Guards against a pin that no CUDA build can be installed with, and kernels that are tested with another compiler. The CPU build
    names none: whoever changes PyTorch's pin finds Triton's in the CUDA build's metadata."""
    pinned = constraints()
    named = [Requirement(text) for text in metadata.requires("torch") or [] if text.startswith("triton")]
    assert all(requirement.specifier.contains(pinned["triton"]) for requirement in named)
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")


@pytest.mark.parametrize("script", PROJECT["scripts"])
def test_each_command_is_there(script: str) -> None:
    """Guards against a command that ends in an ImportError, which no test that uses `python -m` would see."""
    module, name = PROJECT["scripts"][script].split(":")
    assert callable(getattr(import_module(module), name))


def test_a_config_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `--config pervit_t` that works in the repository only, or that takes another file than the one named."""
    monkeypatch.chdir(tmp_path)
    for name in ("pervit_t", "pervit_t.yaml"):
        assert find_recipe(name) == shipped_recipes() / "pervit_t.yaml"
    for name in ("ablations/pervit_table5_lrn", "ablations/pervit_table5_lrn.yaml"):
        assert find_recipe(name).config == "ablations/pervit_table5_lrn"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "pervit_t.yaml").write_text("base: pervit_s\n")
    assert find_recipe("pervit_t") == Path("configs/pervit_t.yaml")  # one's own comes first
    (tmp_path / "mine.yaml").write_text("base: pervit_m\noutput_dir: runs/mine\n")
    assert load_config("mine.yaml").model.name == "pervit_m"  # a base is found likewise
    assert load_config("ablations/pervit_table5_lrn").model.name == "pervit_t"  # whose base is the shipped one
    (tmp_path / "pervit_m").touch()
    assert find_recipe("pervit_m") == Path("pervit_m")  # an existing path wins
    for wrong, advice in (
        ("pervit_z", "did you mean pervit_"),
        ("configs/pervit_s.yaml", "did you mean pervit_s?"),
        ("pervit_table5_lrn", "did you mean ablations/pervit_table5_lrn?"),
        ("configs/ablations/pervit_table5_lrn.yaml", "did you mean ablations/pervit_table5_lrn?"),
        ("ablations/pervit_table5_lnr", "did you mean ablations/pervit_table5_lrn?"),
        (tmp_path / "pervit_s", "did you mean pervit_s?"),  # an absolute path is no name
        ("nothing_like_it", f"no config of that name is in {shipped_recipes()}: pass a file"),
    ):
        with pytest.raises(UserError, match=re.escape(f"{wrong} does not exist")) as error:
            find_recipe(wrong)
        assert advice in str(error.value)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the wheel, as pip would install them."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pipeline", "data_prep", "configs"):
        shutil.copytree(REPOSITORY / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, folder / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, folder / "source"], check=True, timeout=PATIENCE)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_a_wheel_brings_the_configs_and_the_licence(wheel: Path, tmp_path: Path) -> None:
    """Guards against an installed package without configs, where only the repository has them."""
    assert {path.relative_to(wheel / "pipeline" / "recipes") for path in wheel.rglob("*.y*ml")} == {
        path.relative_to(REPOSITORY / "configs") for path in (REPOSITORY / "configs").rglob("*.y*ml")
    }
    modules = {
        path.relative_to(REPOSITORY) for folder in ("pipeline", "data_prep") for path in (REPOSITORY / folder).rglob("*.py")
    }
    assert {path.relative_to(wheel) for path in wheel.rglob("*.py")} == modules
    assert len(list(wheel.rglob("licenses/LICENSE"))) == 1

    program = "from pipeline.config import load_config; print(load_config('ablations/pervit_table5_lrn').model.name)"
    environment = clean_environment(PYTHONPATH=str(wheel))
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert found.stdout == "pervit_t\n", found.stderr


@pytest.mark.long
def test_the_demo_of_a_wheel(wheel: Path, tmp_path: Path) -> None:
    """Guards against a demo that needs the repository, and one that leaves nothing to go on with."""
    pytest.importorskip("sklearn")
    small = "model.image_size=32 train.global_batch_size=8 train.micro_batch_size=8 eval.batch_size=64 --steps 2"
    words = [sys.executable, "-m", "pipeline", "demo", *small.split()]
    environment = clean_environment(PYTHONPATH=str(wheel))
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"^== (\d)/4", done.stdout, re.MULTILINE) == ["1", "2", "3", "4"]
    assert "top-1 on 359 held-out images" in done.stdout and "pervit_t, after 2 steps" in done.stdout
    assert (tmp_path / "runs" / "demo" / "checkpoints").is_dir()

    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError(name='sklearn')\n")
    shutil.rmtree(tmp_path / "demo")
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 2 and sentence.startswith(
        "error: the demo requires scikit-learn, which is not installed: pip install "
    )


def make(folder: Path, *words: str) -> str:
    """What `make` says in a copy of the repository's files that it reads."""
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        if not (folder / file).exists():
            shutil.copy(REPOSITORY / file, folder)
    environment = {
        name: value for name, value in clean_environment().items() if name not in ("HAS_GPU", "MAKEFLAGS", "MAKELEVEL")
    }
    done = subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_installs_the_build_that_is_asked_for(tmp_path: Path) -> None:
    """Guards against `make install HAS_GPU=1` after a demo that leaves the CPU's PyTorch, and against a test that swaps it back."""
    assert "--index-url https://download.pytorch.org/whl/cpu" in make(tmp_path, "-n", "install", "HAS_GPU=")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed-cpu").touch()
    for words in (["install"], ["install", "HAS_GPU="]):
        assert "Nothing to be done" in make(tmp_path, "-n", *words)
    for words, build in ((["HAS_GPU=1"], "cuda13"), (["CUDA=13"], "cuda13"), (["CUDA=12"], "cuda12")):
        plan = make(tmp_path, "-n", "install", *words)
        assert re.search(
            rf"uninstall .*torch.*install .*--constraint constraints.txt.*touch .venv/.installed-{build}\n", plan, re.S
        )
        assert ("whl/cpu" in plan, "nvidia-dali-cuda120\n" in plan) == (False, build == "cuda12")
    (tmp_path / ".venv" / ".installed-cpu").rename(tmp_path / ".venv" / ".installed-cuda12")
    assert "/pip " not in make(tmp_path, "-n", "test")  # no driver here is no wish for another build
    assert "uninstall --quiet --yes torch nvidia-dali-cuda120" in make(tmp_path, "-n", "install", "HAS_GPU=")


def test_make_clean_leaves_what_it_cannot_make_again(tmp_path: Path) -> None:
    """Guards against `make clean` deleting every checkpoint."""
    kept = [tmp_path / name for name in ("runs/a/checkpoints/step-00000001", "data/imagenet", "logs", "pipeline")]
    gone = [
        tmp_path / name for name in (".venv/bin", "demo/shards", "build", "pervit_pipeline.egg-info", "pipeline/__pycache__")
    ]
    for folder in [*kept, *gone, *(tmp_path / name for name in ("data_prep", "examples", "tests", "benchmarks"))]:
        folder.mkdir(parents=True)
    make(tmp_path, "clean")
    assert [folder for folder in kept if not folder.exists()] == []
    assert [folder for folder in gone if folder.exists()] == []


def test_the_citation_names_the_papers() -> None:
    """Guards against a citation file that GitHub and Zenodo do not read, or of another version."""
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert all({"type", "title", "authors", "year", "url"} <= reference.keys() for reference in citation["references"])
    titles = " ".join(reference["title"] for reference in citation["references"])
    assert all(word in titles for word in ("Peripheral", "ConViT", "Locally Shifted", "Cross-Token", "distillation", "MLPs"))
    assert (REPOSITORY / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]
