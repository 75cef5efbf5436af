"""The config is typed and closed; docs/config.md is true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config import (
    Config,
    TrainConfig,
    accumulation_steps,
    config_from_dict,
    config_to_yaml,
    flatten,
    load_config,
    load_recipe,
)
from pipeline.config.__main__ import key_list, markdown_table
from pipeline.config.problems import ALIASES
from pipeline.errors import UserError
from support.launching import PATIENCE, REPOSITORY, clean_environment

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_shipped_config_loads_and_survives_a_round_trip(path: Path) -> None:
    """Guards against a config that a release ships broken, and against a resolved config that reads back differently."""
    config = load_config(path)
    assert config_from_dict(yaml.safe_load(config_to_yaml(config)), "round trip") == config


def test_recipe_of_table_s6() -> None:
    """Guards against a recipe that silently drifts from the paper's (Supplement Table S6)."""
    folder = CONFIGS[0].parent
    for size, decay, warmup, drop_path in (("t", 0.03, 5, 0.0), ("s", 0.05, 5, 0.1), ("m", 0.05, 20, 0.2)):
        config = load_config(folder / f"pervit_{size}.yaml")
        assert (config.model.name, config.model.image_size, config.model.drop_path) == (f"pervit_{size}", 224, drop_path)
        assert (config.optim.weight_decay, config.optim.warmup_epochs) == (decay, warmup)
        assert (config.train.epochs, config.train.global_batch_size, config.train.label_smoothing) == (300, 1024, 0.1)
        assert (config.optim.lr, config.optim.lr_batch_size, config.optim.clip_grad_norm) == (5e-4, 512, None)


def test_values_change_in_a_copy() -> None:
    """Guards against a config that is settled in place, and against sections whose other keys are lost."""
    config = load_config("pervit_m")
    settled = config.with_values({"train.micro_batch_size": 7, "train.precision": "fp32", "seed": 3})
    before, now = flatten(config), flatten(settled)
    assert {key: now[key] for key in now if now[key] != before[key]} == {
        "train.micro_batch_size": 7,
        "train.precision": "fp32",
        "seed": 3,
    }
    assert config == load_config("pervit_m")


def test_the_recipe_of_a_file_is_the_shipped_config_below_it(tmp_path: Path) -> None:
    """Guards against a user's own changes that are taken for the recipe, with which the log compares them."""
    mine, alone = tmp_path / "mine.yaml", tmp_path / "alone.yaml"
    mine.write_text("base: pervit_m\ntrain: {micro_batch_size: 32}\n")
    (tmp_path / "more.yaml").write_text("base: mine.yaml\nseed: 1\n")
    alone.write_text("train: {micro_batch_size: 16}\n")
    for path in ("pervit_m", mine, tmp_path / "more.yaml"):
        recipe = load_recipe(path)
        assert recipe and Path(recipe.name).name == "pervit_m.yaml" and recipe.config == load_config("pervit_m")
    recipe = load_recipe(alone)
    assert recipe and recipe.name == str(alone) and recipe.config.train.micro_batch_size == 16
    alone.write_text("train: {micro_batch_size: 9}\naugment: {mixup: 1, mix_group: 4}\n")
    assert load_recipe(alone) is None and load_config(alone, ["train.micro_batch_size=8"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epoch=3", "unknown key 'train.epoch': did you mean 'train.epochs'?"),
        ("epochs=3", "did you mean 'train.epochs'?"),
        ("nonsense.key=3", "unknown key 'nonsense'"),
        ("train.lr=1e-3", "unknown key 'train.lr': did you mean 'optim.lr'?"),
        ("data.epochs=3", "unknown key 'data.epochs': did you mean 'train.epochs'?"),
        ("train.seed=3", "did you mean 'seed'?"),
        ("train.weight_deca=0", "did you mean 'optim.weight_decay'?"),
        ("train.learning_rate=1e-3", "did you mean 'optim.lr'?"),
        ("optimizer.wd=0", "unknown key 'optimizer': did you mean 'optim.weight_decay'?"),
        ("batch-size=64", "did you mean 'train.global_batch_size' or 'train.micro_batch_size'?"),
        ("train.every_steps=3", "did you mean 'log.every_steps' or 'checkpoint.every_steps'?"),
        ("eval.every_steps=3", "did you mean 'eval.every_epochs', 'log.every_steps' or 'checkpoint.every_steps'?"),
        ("optimm=3", "did you mean 'optim'?"),
        ("model.depth=3", "unknown key 'model.depth': remove it; `pervit config` lists the keys."),
        ("train.epochs=many", "train.epochs must be a number, got 'many'."),
        ("train.max_steps=3.5", "train.max_steps must be a whole number, got 3.5."),
        ("train.zero_stage=4", "train.zero_stage must be at most 3, got 4."),
        ("train.zero_stage=true", "not a boolean"),
        ("train.precision=fp16", "'auto', 'bf16' or 'fp32'"),
        ("train.global_batch_size=0", "train.global_batch_size must be at least 1, got 0."),
        ("data.crop_scale=[1.0, 0.1]", "from low to high"),
        ("data.crop_scale=[0.1]", "data.crop_scale must have 2 values, got 1."),
        ("augment.mix_group=7", "augment.mix_group must divide train.micro_batch_size 128, got 7 ("),
        (
            "augment={mixup: 0.8, repeats: 3, mix_group: 4}",
            "augment.mix_group must be at least 2 x augment.repeats = 6, got 4.",
        ),
        ("augment.cutmix=0.001", "augment.cutmix must be 0 or at least 0.01, got 0.001."),
        ("data.order=sorted", "'full' or 'block'"),
        ("train=3", "train must be a section, got 3: write train.NAME=VALUE."),
        ("train.epochs", "not of the form dotted.key=value"),
        ("train.epochs=[1", "not valid YAML"),
        ("data.mean=[.nan, 0, 0]", "finite number"),
        ("output_dir=''", "must not be empty, got ''."),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_that_names_it(override: str, expected: str, tmp_path: Path) -> None:
    """Guards against a typo that trains for a week with the default."""
    with pytest.raises(UserError) as error:
        load_config(CONFIGS[0].parent / "pervit_m.yaml", [override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_what_other_projects_call_a_key_leads_to_one_that_exists() -> None:
    """Guards against advice to set a key that was renamed, and against a name for another key that has become one itself."""
    keys = flatten(Config())
    assert {key for meant in ALIASES.values() for key in meant} <= set(keys)
    assert not set(ALIASES) & {key for key in keys if "." not in key}


def test_a_key_given_twice_is_refused_and_a_section_as_value_is_merged(tmp_path: Path) -> None:
    """Guards against a value that is silently the last of two, and against `train={epochs: 3}` resetting all other keys."""
    (tmp_path / "twice.yaml").write_text("train:\n  epochs: 3\n  epochs: 4\n")
    with pytest.raises(UserError, match="the key 'epochs' is given 2 times"):
        load_config(tmp_path / "twice.yaml")
    config = load_config(CONFIGS[0].parent / "demo.yaml", ["train={epochs: 3}"])
    assert (config.train.epochs, config.train.micro_batch_size, config.train.precision) == (3, 32, "fp32")


def test_a_base_is_overlaid_and_a_cycle_is_refused(tmp_path: Path) -> None:
    """Guards against an overlay that replaces a whole section of its base, and against endless recursion."""
    (tmp_path / "base.yaml").write_text("train: {epochs: 7, zero_stage: 2}\n")
    (tmp_path / "over.yaml").write_text("base: base.yaml\ntrain: {epochs: 9}\n")
    config = load_config(tmp_path / "over.yaml", ["optim.lr=3e-4"])
    assert (config.train.epochs, config.train.zero_stage, config.optim.lr) == (9, 2, 3e-4)
    (tmp_path / "base.yaml").write_text("base: over.yaml\n")
    with pytest.raises(UserError, match="its own base"):
        load_config(tmp_path / "over.yaml")
    (tmp_path / "base.yaml").write_text(f"base: {'x' * 5000}\n")  # more than a file system takes
    with pytest.raises(UserError, match=r"x+\.\.\. cannot be read \(File name too long\): pass another file") as error:
        load_config(tmp_path / "over.yaml")
    assert len(str(error.value)) < 300


def test_accumulation_follows_from_the_global_batch_or_shows_the_arithmetic() -> None:
    """Guards against a global batch that is not the recipe's (512 instead of 1024 cost DeiT users 3 points)."""
    assert accumulation_steps(TrainConfig(global_batch_size=1024, micro_batch_size=64), 4) == 4
    with pytest.raises(
        UserError, match=r"must be a multiple of .* 64 x 3 processes = 192, got 1024 .* 5\.333 accumulation steps"
    ):
        accumulation_steps(TrainConfig(global_batch_size=1024, micro_batch_size=64), 3)
    with pytest.raises(UserError, match="set train.micro_batch_size to 8"):
        accumulation_steps(TrainConfig(global_batch_size=16, micro_batch_size=64), 2)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("output_dir=runs/exp #2", "output_dir", "runs/exp #2"),
        ("output_dir=2024-01-01", "output_dir", "2024-01-01"),
        ("output_dir=2024-13-45", "output_dir", "2024-13-45"),
        ("output_dir=null", "output_dir", "null"),
        ("output_dir=a: [b", "output_dir", "a: [b"),
        ("output_dir= a=b ", "output_dir", " a=b "),
        ("output_dir='a b'", "output_dir", "a b"),
        ('output_dir="a \\u0062"', "output_dir", "a b"),
        ("output_dir='a' 'b'", "output_dir", "'a' 'b'"),
        ("output_dir='a'b'", "output_dir", "'a'b'"),
        ("data.path=123", "path", "123"),
        ("train.init_from=null", "init_from", None),
        ("train.init_from=~", "init_from", "~"),
        ("train.init_from='null'", "init_from", "null"),
        ("data.order='block'", "order", "block"),
    ],
)
def test_text_on_the_command_line_is_taken_as_it_stands(override: str, key: str, value: str | None) -> None:
    """Guards against `runs/exp #2` that becomes `runs/exp` (YAML's comment): two jobs in one folder, one goes on with the other's run."""
    config = load_config(CONFIGS[0].parent / "pervit_m.yaml", [override])
    section = {"path": config.data, "order": config.data, "init_from": config.train}.get(key, config)
    assert getattr(section, key) == value


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.micro_batch_size=1000000000000", "train.micro_batch_size must be at most 16384, got 1000000000000."),
        ("train.global_batch_size=1000000000000", "train.global_batch_size must be at most 1048576, got 1000000000000."),
        ("train.epochs=1e308", "train.epochs must be at most 1000000, got 1e308."),
        ("distributed.progress_timeout=1e300", "distributed.progress_timeout must be at most 2592000, got 1e300."),
        ("data.mean=[123.675, 116.28, 103.53]", "data.mean must be at most 10, got 123.675."),
        ("data.mean=[true, 0, 0]", "not a boolean"),
        ("data.crop_scale=0.3,1", "data.crop_scale must be a list, got '0.3,1': write data.crop_scale=[0.3,1]."),
        ("data.crop_scale=0.3", "data.crop_scale must be a list, got 0.3: write data.crop_scale=[0.08,1.0]."),
        ("data.crop_scale=null", "data.crop_scale must be a list, got null: write data.crop_scale=[0.08,1.0]."),
        ("data.size_schedule=null", "data.size_schedule must be a list, got null: write data.size_schedule=[]."),
        ("checkpoint.accept=data", "write checkpoint.accept=[data]."),
        ("data.mean=[0.5]", "data.mean must have 3 values, got 1."),
        ("data.mean=[0.5, 0.5, 0.5, 0.5]", "data.mean must have 3 values, got 4."),
        ("data={path: 2024-01-01}", "data.path must be text, got 2024-01-01, which YAML reads as a date: put it in quotes."),
        ("data={path: 123}", "data.path must be text, got 123, which YAML reads as a number: put it in quotes."),
        ("output_dir=a\nb", "control character U+000A"),
        ("train.init_from=", "must not be empty, got ''."),
        ("seed=2024-13-45", "not valid YAML (month must be in 1..12)"),
        ("seed=!!int x", "not valid YAML (invalid literal"),
        ("seed=!!bool x", "not valid YAML (a value does not match its tag)"),
        ("seed=" + "[" * 3000, "not valid YAML (it is nested too deeply)"),
        ("seed=&a [*a]", "not valid YAML"),
        (
            "model.switches.cpe=[[1]]",
            "model.switches must have a boolean, a number, text, null or a list of these as 'cpe', got [[1]].",
        ),
        ("model.switches={cpe: .inf}", "as 'cpe', got inf."),
    ],
)
def test_a_value_that_would_hang_overflow_or_mean_something_else_is_refused(override: str, expected: str) -> None:
    """Guards against eight minutes of building a list, an OverflowError from three libraries down, and pixels normalized as if up to 255."""
    with pytest.raises(UserError) as error:
        load_config(CONFIGS[0].parent / "pervit_m.yaml", [override])
    assert expected in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_an_error_names_the_override_or_the_file_that_set_the_value(tmp_path: Path) -> None:
    """Guards against a mistake on the command line that is looked for in the file, or in the wrong one of two files."""
    (tmp_path / "base.yaml").write_text("train: {epochs: many}\ndata: {path: shards}\n")
    (tmp_path / "over.yaml").write_text("base: base.yaml\naugment: {mixup: 0.8, mix_group: 8}\n")

    def said(*overrides: str) -> str:
        with pytest.raises(UserError) as error:
            load_config(tmp_path / "over.yaml", list(overrides))
        return str(error.value)

    assert said().startswith(f"config {tmp_path}/base.yaml: train.epochs must be a number, got 'many'")
    assert said("train={epochs: 0}").startswith("override 'train={epochs: 0}': train.epochs must be positive, got 0")
    fine = "train.epochs=3"
    assert said(fine, "data.flip=2").startswith("override 'data.flip=2': data.flip must be at most 1, got 2")
    assert said(fine, "train.micro_batch_size=12", "seed=1").startswith(
        "override 'train.micro_batch_size=12': augment.mix_group must divide train.micro_batch_size 12, got 8"
    )
    (tmp_path / "over.yaml").write_text("base: base.yaml\ntrain: {epochs: 3}\naugment: {mixup: 0.8, mix_group: 3}\n")
    assert said("seed=1").startswith(
        f"config {tmp_path}/over.yaml: augment.mix_group must divide train.micro_batch_size 128, got 3"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train:\n  epochs: !!int x\n", "invalid literal for int() with base 10: 'x' in line 2"),
        ("output_dir: 2024-13-45\n", "month must be in 1..12"),
        ("output_dir: 2024-01-01\n", "output_dir must be text, got 2024-01-01, which YAML reads as a date: put it in quotes."),
        ("output_dir: 123\n", "output_dir must be text, got 123, which YAML reads as a number: put it in quotes."),
        ("output_dir: !!timestamp x\n", "a value does not match its tag"),
        ("model: " + "[" * 3000, "it is nested too deeply"),
        ("base: [a]\n", "base must be a file name, got ['a']"),
        ("1: 2\n", "is not a string"),
        ("a: &a {b: *a}\n", "recursive"),
        ("seed: \xff\n", "not valid YAML"),
    ],
)
def test_yaml_that_python_stumbles_over_is_one_sentence(text: str, expected: str, tmp_path: Path) -> None:
    """Guards against a traceback from PyYAML, which catches less than it raises."""
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        load_config(path)
    assert expected in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("whole", "micro", "processes", "unit", "expected"),
    [
        (32, 32, 3, 8, ["number of processes, such as 2 with train.micro_batch_size=16 or 4 with train.micro_batch_size=8."]),
        (33, 32, 3, 8, ["set train.global_batch_size to a multiple of 24"]),
        (33, 32, 3, 1, ["set train.micro_batch_size to 11, or start", "such as 1 with train.micro_batch_size=11 or 11 with"]),
        (48, 32, 3, 8, ["set train.micro_batch_size to 16, or start", "2 with train.micro_batch_size=24 or 6 with"]),
        (1024, 64, 3, 8, ["such as 2 or 4."]),
        (2**20, 2**14, 1021, 1, ["such as 512 with train.micro_batch_size=2048 or 1024 with"]),
    ],
)
def test_the_advice_about_batches_works(whole: int, micro: int, processes: int, unit: int, expected: list[str]) -> None:
    """Guards against advice that a run which was begun cannot follow (another global batch) or that the next check refuses."""
    with pytest.raises(UserError) as error:
        accumulation_steps(TrainConfig(global_batch_size=whole, micro_batch_size=micro), processes, unit)
    for part in expected:
        assert part in str(error.value)


def test_the_table_can_be_had_in_parts_without_loading_pytorch() -> None:
    """Guards against a `--help` that takes ten seconds, and a typing error that prints an empty table."""

    def said(*words: str) -> subprocess.CompletedProcess:
        program = "import runpy, sys; sys.argv[0] = 'config'\ntry: runpy.run_module('pipeline.config', run_name='__main__')\n"
        program += "finally: print({'torch', 'numpy'} & set(sys.modules))"
        root = CONFIGS[0].parent.parent
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=root,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    assert "optim train." in said("--help").stdout and "set()" in said("--help").stdout
    table = said("optim.lr", "seed").stdout
    assert (
        "\noptim.lr_batch_size=512\n" in table and "\nseed=" in f"\n{table}" and "optim.eps" not in table and "set()" in table
    )
    assert said("optimm").returncode == 2 and "no key begins with 'optimm'" in said("optimm").stderr


def test_docs_config_has_every_key() -> None:
    """Guards against a key that the command lists and the page does not."""
    page = (CONFIGS[0].parent.parent / "docs" / "config.md").read_text()
    assert [row for row in markdown_table().splitlines() if row not in page] == []


def test_keys_in_a_terminal() -> None:
    """Guards against Markdown where nobody renders it, lines that a terminal breaks, and a key that is left out."""
    shown = key_list(("optim.", "seed"), 60).splitlines()
    keys = [line.partition("=")[0] for line in shown if line and not line.startswith(" ")]
    assert keys == [key for key in flatten(Config()) if key.startswith(("optim.", "seed"))]
    assert not any("|" in line or "`" in line for line in shown) and max(map(len, shown)) <= 60
    assert shown[shown.index("optim.lr=0.0005") + 1].startswith("    Peak learning rate")


@pytest.mark.parametrize("key", ["train.init_from", "data.cache", "output_dir", "train.teacher"])
def test_a_password_in_a_url_is_refused_and_not_repeated(key: str, tmp_path: Path) -> None:
    """Guards against a secret that lies in config.yaml, logs and job scripts of every run, or in the sentence that refuses it."""
    section, _, name = key.rpartition(".")
    tree = {name: "https://me:SECRET@host/x"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({section: tree} if section else tree))
    given = [("demo", [f"{key}=https://me:{password}@host/x"]) for password in ("SECRET", "my SECRET")]
    for file, overrides in ((tmp_path / "mine.yaml", []), *given):
        with pytest.raises(UserError, match="must not hold a user or a password") as error:
            load_config(file, overrides)
        assert "SECRET" not in str(error.value) and "SECRET" not in error.value.problem
