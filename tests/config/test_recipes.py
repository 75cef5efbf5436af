"""Every config of ``configs/`` is a run that can be started, says what it is, and states no more than it changes.

The sweep that trains every one of them takes about half an hour: ``PERVIT_ALL_RECIPES=1 pytest -m recipes_all``.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest
import torch
import yaml

from pipeline.config import Config, accumulation_steps, flatten, load_config
from pipeline.models import create_model, model_entry
from support.launching import REPOSITORY, clean_environment, run_script
from support.runs import evaluation_rows, step_rows

CONFIGS = REPOSITORY / "configs"
PATHS = sorted(CONFIGS.rglob("*.yaml"))
if find_spec("timm") is None:
    PATHS = [path for path in PATHS if not load_config(path).model.name.startswith("timm:")]
RECIPES = [path for path in PATHS if path.parent.name == "base"]  # what runs have in common; not runs themselves
RUNS = [path for path in PATHS if path not in RECIPES]
OURS = [CONFIGS / "demo.yaml", CONFIGS / "cifar10.yaml", CONFIGS / "finetune_folder.yaml"]  # from no paper
AT_ONCE = 6  # configs per process: DeepSpeed keeps each engine's memory until the process ends
QUICK = (
    "pervit_t convit_ti deit_t lsat_t_32_cifar10 posmlp_t gmlp_s ablations/pervit_table5_lrn "
    "ablations/convit_table3_g_gpsa_frozen_no_conv_init ablations/posmlp_table10_linear_linear"
)


def name(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name)


@cache
def loaded(path: Path) -> Config:
    return load_config(path)


def header(path: Path) -> list[str]:
    """The comment lines that a config begins with."""
    lines = path.read_text().splitlines()
    return lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]


def stated(path: Path) -> dict[str, object]:
    """Dotted key -> value of what this one file says."""
    return dotted(yaml.safe_load(path.read_text()))


def dotted(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat


def inherited(path: Path) -> dict[str, object]:
    """Dotted key -> value of what the file's bases say."""
    base = stated(path).get("base")
    if base is None:
        return {}
    return {**inherited(path.parent / base), **stated(path.parent / base)}


def test_models_and_switches_exist() -> None:
    """Guards against a config that names a model, a switch or an image size that there is not."""
    built = set()
    for path in PATHS:
        model = loaded(path).model
        if (key := str(model)) not in built:
            with torch.device("meta"):
                create_model(model.name, model.num_classes, model.image_size, model.drop_path, switches=model.switches)
            built.add(key)
    assert len(built) > 60


PRINTED_PARAMETERS = {  # millions, as the papers' tables print them for a row
    "lsat_table2_t_32": 10.2,
    "lsat_table2_s_32": 36.2,
    "lsat_table2_b_32": 115.8,
    "lsat_table5_a_no_shifts": 6.8,
    "lsat_table5_b_axes": 8.4,
    "lsat_table5_c_translation_shared_position": 6.8,
    "lsat_table5_d_translation": 10.1,
    "posmlp_table1_gmlp_sgu": 19.4,  # this and the next three: Table 3
    "posmlp_table1_gmlp_ggqpe": 18.2,
    "posmlp_table1_posmlp_sgu": 21.8,
    "posmlp_table1_posmlp_ggqpe": 20.9,
    "posmlp_table10_linear_linear": 23.3,
    "posmlp_table10_conv_linear": 23.3,
    "posmlp_table10_linear_conv": 21.8,
}


@pytest.mark.parametrize("row", PRINTED_PARAMETERS)
def test_a_row_has_the_parameters_its_table_prints(row: str) -> None:
    """Guards against an overlay whose switches make another model than the row it is named after."""
    model = loaded(CONFIGS / "ablations" / f"{row}.yaml").model
    with torch.device("meta"):
        built = create_model(model.name, model.num_classes, model.image_size, switches=model.switches)
    assert sum(p.numel() for p in built.parameters()) / 1e6 == pytest.approx(PRINTED_PARAMETERS[row], abs=0.05)


@each([path for path in PATHS if "base" in stated(path)])
def test_states_only_what_differs(path: Path) -> None:
    """Guards against a copied recipe: a key repeated with its base's value, or a switch set to the model's own default."""
    above = inherited(path)
    repeated = {key: value for key, value in stated(path).items() if key != "base" and key in above and above[key] == value}
    assert not repeated
    defaults = {f"model.switches.{key}": field.default for key, field in switches_of(path).items()}
    idle = {
        key: value for key, value in stated(path).items() if key in defaults and value == defaults[key] and key not in above
    }
    assert not idle


def switches_of(path: Path) -> dict:
    return model_entry(loaded(path).model.name).switches.model_fields


@each(RUNS)
def test_header_has_the_command_the_source_and_the_figures(path: Path) -> None:
    """Guards against a recipe that nobody can trace to its table, and a command that starts another one."""
    lines = header(path)
    commands = [line for line in lines if f"pipeline.train --config configs/{name(path)}" in line]
    assert len(commands) == 1 and lines.index(commands[0]) < 3
    processes = int(re.search(r"launch/local\.sh (\d+) ", commands[0])[1])
    accumulation_steps(loaded(path).train, processes, loaded(path).augment.unit)  # raises where the batch does not divide
    if path in OURS:
        return
    submitted = [line for line in lines if line.startswith("# sbatch launch/")]
    assert len(submitted) == 1 and (
        f"/train.slurm configs/{name(path)} " in submitted[0] or f"/{path.stem}.slurm " in submitted[0]
    )
    text = " ".join(lines)
    assert re.search(r"(Table|Tables|Fig\.|Eq\.) S?\d", text) and "Paper: " in text
    assert re.search(r"Paper: .*(% top-1|curves only)", text)


@each(RECIPES)
def test_a_base_says_that_it_is_one(path: Path) -> None:
    """Guards against a base that is mistaken for a run, and one that nothing takes any more."""
    assert "not a run" in " ".join(line.strip("# ") for line in header(path)) and "output_dir" not in stated(path)
    assert any((user.parent / stated(user).get("base", "")).resolve() == path for user in PATHS)


def test_no_two_runs_share_a_folder() -> None:
    """Guards against an ablation that continues, or is refused by, another config's run."""
    for path in RUNS:
        assert loaded(path).output_dir == f"runs/{path.stem}"
    assert len({path.stem for path in RUNS}) == len(RUNS)


@each([path for path in RUNS if "imagenet_" in loaded(path).data.path])
def test_a_subset_is_made_as_the_header_says(path: Path) -> None:
    """Guards against a table's "10 %" that trains on other shards, and a longer schedule that is not made longer."""
    percent = int(loaded(path).data.path.removeprefix("data/imagenet_"))
    chain = [path, *bases(path)]
    made = [line for each_path in chain for line in header(each_path) if "--subset" in line]
    assert f"--output {loaded(path).data.path} --subset {percent / 100:g} --subset-rule first" in made[0]
    assert loaded(path).train.scale_epochs != path.stem.startswith("posmlp")  # PosMLP trains its half for fewer steps


def bases(path: Path) -> list[Path]:
    base = stated(path).get("base")
    return [] if base is None else [path.parent / base, *bases(path.parent / base)]


@each([path for path in RUNS if loaded(path).train.init_from])
def test_fine_tuning_starts_from_a_run_of_this_folder(path: Path) -> None:
    """Guards against fine-tuning configs whose starting point no config makes."""
    start = CONFIGS / f"{Path(loaded(path).train.init_from).name}.yaml"
    assert loaded(start).output_dir == loaded(path).train.init_from
    assert loaded(start).model.name == loaded(path).model.name


@each([path for path in RUNS if loaded(path).train.teacher])
def test_a_teacher_is_a_run_of_this_folder_on_the_same_images(path: Path) -> None:
    """Guards against distillation configs whose teacher no config makes, or that the student's run will refuse."""
    teacher = CONFIGS / f"{Path(loaded(path).train.teacher).name}.yaml"
    assert loaded(teacher).output_dir == loaded(path).train.teacher
    for key in ("image_size", "num_classes"):
        assert getattr(loaded(teacher).model, key) == getattr(loaded(path).model, key)
    assert loaded(teacher).data.path == loaded(path).data.path


def peak_lr(config: Config) -> float:
    return config.optim.lr * config.train.global_batch_size / config.optim.lr_batch_size


@pytest.mark.parametrize(
    ("run", "lr", "expected"),
    [
        ("convit_s", 1e-3, "1024 epochs=300 decay=0.05 warmup=5 drop=0.1 erase=0.25 mixup=0.8 views=3 clip=None"),
        ("deit_b", 1e-3, "1024 epochs=300 decay=0.05 warmup=5 drop=0.1 erase=0.25 mixup=0.8 views=3 clip=None"),
        ("convit_b_plus", 4e-4, "512 epochs=300 decay=0.05 warmup=5 drop=0.1 erase=0.25 mixup=0.8 views=3 clip=None"),
        ("deit_b_plus_cifar100", 4e-4, "512 epochs=3000 decay=0.05 warmup=5 drop=0.1 erase=0.25 mixup=0.8 views=3 clip=None"),
        ("lsat_t_224", 7.1875e-4, "736 epochs=300 decay=0.05 warmup=20 drop=0.1 erase=0.25 mixup=0.8 views=1 clip=None"),
        ("lsat_s_224", 2.5e-4, "512 epochs=300 decay=0.05 warmup=5 drop=0.1 erase=0.25 mixup=0.8 views=1 clip=None"),
        ("lsat_s_32_cifar100", 3.125e-4, "320 epochs=300 decay=0.05 warmup=5 drop=0.1 erase=0.25 mixup=0.8 views=1 clip=None"),
        ("posmlp_t", 2e-3, "1024 epochs=300 decay=0.067 warmup=10 drop=0.1 erase=0.0 mixup=0.5 views=1 clip=1.0"),
        ("posmlp_b", 1e-3, "480 epochs=300 decay=0.067 warmup=10 drop=0.1 erase=0.0 mixup=0.5 views=1 clip=1.0"),
        ("pervit_m_cifar100", 7.5e-6, "768 epochs=1000 decay=0.05 warmup=5 drop=0.1 erase=0.0 mixup=0.8 views=3 clip=None"),
        ("pervit_m_inat19", 7.5e-5, "768 epochs=360 decay=0.05 warmup=5 drop=0.1 erase=0.1 mixup=0.8 views=3 clip=None"),
    ],
)
def test_the_recipe_is_the_published_one(run: str, lr: float, expected: str) -> None:
    """Guards against a base that is edited for one model and silently changes the recipe of all others."""
    config = loaded(CONFIGS / f"{run}.yaml")
    train, optim, augment = config.train, config.optim, config.augment
    assert train.ema_decay == (0.99992 if run.startswith("posmlp") else None)
    assert math.isclose(peak_lr(config), lr)
    found = (
        f"{train.global_batch_size} epochs={train.epochs:g} decay={optim.weight_decay:g} warmup={optim.warmup_epochs:g} "
        f"drop={config.model.drop_path} erase={augment.erasing} mixup={augment.mixup} views={augment.repeats} "
        f"clip={optim.clip_grad_norm}"
    )
    assert found == expected


@each(RUNS)
def test_the_learning_rate_falls(path: Path) -> None:
    """Guards against a floor above the peak, with which the cosine would climb."""
    config = loaded(path)
    assert config.optim.min_lr < peak_lr(config) and config.optim.warmup_lr < peak_lr(config)


@pytest.fixture(scope="session")
def tiny_shards(digits_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four train images and one val image of each digit."""
    folder = tmp_path_factory.mktemp("tiny")
    for split, count in (("train", 4), ("val", 1)):
        for digit in range(10):
            target = folder / "images" / split / str(digit)
            target.mkdir(parents=True)
            for image in sorted((digits_images / split / str(digit)).iterdir())[:count]:
                shutil.copy(image, target)
    run_script("data_prep/shard_imagenet.py", "--source", folder / "images", "--output", folder / "shards")
    return folder / "shards"


def train_two_steps(paths: list[Path], shards: Path, out: Path) -> None:
    """All configs in one process; fails unless each took two finite steps and was evaluated."""
    command = [sys.executable, "tests/support/train_recipes.py", shards, out, *paths]
    result = subprocess.run(list(map(str, command)), cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout[-1000:]}\n{result.stderr[-3000:]}"
    for path in paths:
        run_dir = out / path.relative_to(CONFIGS).with_suffix("")
        steps = step_rows(run_dir)
        assert [row["step"] for row in steps] == [1, 2], name(path)
        assert all(math.isfinite(row["loss"]) and 0 < row["grad_norm"] < math.inf for row in steps), name(path)
        assert evaluation_rows(run_dir), name(path)
        ran, recipe = flatten(load_config(run_dir / "config.yaml")), flatten(loaded(path))
        for key in ("model.name", "model.switches", "augment.repeats", "optim.lr", "train.ema_decay"):
            assert ran[key] == recipe[key], f"{name(path)}: {key}"
        chosen = ("bf16", "fp32") if recipe["train.precision"] == "auto" else (recipe["train.precision"],)
        assert ran["train.precision"] in chosen, name(path)


def test_one_config_of_each_family_trains(tiny_shards: Path, tmp_path: Path) -> None:
    """Guards against a recipe that loads but cannot take a step: a switch that breaks a model's pass, a batch that will not mix."""
    train_two_steps([CONFIGS / f"{run}.yaml" for run in QUICK.split()], tiny_shards, tmp_path)


def family(path: Path) -> str:
    return path.parent.name if path in RECIPES else path.stem.split("_")[0]


@pytest.mark.recipes_all
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.environ.get("PERVIT_ALL_RECIPES"), reason="takes half an hour: set PERVIT_ALL_RECIPES=1")
@pytest.mark.parametrize(
    "members", [list(g) for _, g in groupby(sorted(PATHS, key=family), family)], ids=lambda m: family(m[0])
)
def test_every_config_trains(members: list[Path], tiny_shards: Path, tmp_path: Path) -> None:
    """Guards against any shipped config that cannot take two steps."""
    for first in range(0, len(members), AT_ONCE):
        train_two_steps(members[first : first + AT_ONCE], tiny_shards, tmp_path / str(first))
