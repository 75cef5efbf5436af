"""The config is typed and closed; its README table is true."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.config import TrainConfig, accumulation_steps, config_from_dict, config_to_yaml, load_config, markdown_table
from pipeline.errors import UserError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


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


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epoch=3", "unknown key 'train.epoch': did you mean 'train.epochs'?"),
        ("epochs=3", "did you mean 'train.epochs'?"),
        ("nonsense.key=3", "unknown key 'nonsense'"),
        ("train.epochs=many", "train.epochs is 'many' (str)"),
        ("train.max_steps=3.5", "train.max_steps is 3.5 (float)"),
        ("train.zero_stage=4", "train.zero_stage is 4"),
        ("train.zero_stage=true", "not a truth value"),
        ("train.precision=fp16", "'bf16' or 'fp32'"),
        ("train.global_batch_size=0", "greater than or equal to 1"),
        ("data.crop_scale=[1.0, 0.1]", "from low to high"),
        ("data.crop_scale=[0.1]", "one more needed"),
        ("augment.mix_group=7", "mix_group 7 must divide train.micro_batch_size 64"),
        ("augment={mixup: 0.8, repeats: 3, mix_group: 4}", "mix_group must be at least 2 x repeats = 6, not 4"),
        ("augment.cutmix=0.001", "must be 0, or at least 0.01"),
        ("data.order=sorted", "'full' or 'block'"),
        ("train=3", "it is a section"),
        ("train.epochs", "not of the form dotted.key=value"),
        ("train.epochs=[1", "not a YAML value"),
        ("data.mean=[.nan, 0, 0]", "finite number"),
        ("output_dir=''", "at least 1 character"),
    ],
)
def test_a_wrong_key_or_value_is_one_sentence_that_names_it(override: str, expected: str, tmp_path: Path) -> None:
    """Guards against a typo that trains for a week with the default."""
    with pytest.raises(UserError) as error:
        load_config(CONFIGS[0].parent / "pervit_m.yaml", [override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_key_given_twice_is_refused_and_a_section_as_value_is_merged(tmp_path: Path) -> None:
    """Guards against a value that is silently the last of two, and against `train={epochs: 3}` resetting all other keys."""
    (tmp_path / "twice.yaml").write_text("train:\n  epochs: 3\n  epochs: 4\n")
    with pytest.raises(UserError, match="the key 'epochs' is given 2 times"):
        load_config(tmp_path / "twice.yaml")
    config = load_config(CONFIGS[0].parent / "pervit_m.yaml", ["train={epochs: 3}"])
    assert (config.train.epochs, config.train.micro_batch_size, config.train.activation_checkpointing) == (3, 64, True)


def test_a_base_is_overlaid_and_a_cycle_is_refused(tmp_path: Path) -> None:
    """Guards against an overlay that replaces a whole section of its base, and against endless recursion."""
    (tmp_path / "base.yaml").write_text("train: {epochs: 7, zero_stage: 2}\n")
    (tmp_path / "over.yaml").write_text("base: base.yaml\ntrain: {epochs: 9}\n")
    config = load_config(tmp_path / "over.yaml", ["optim.lr=3e-4"])
    assert (config.train.epochs, config.train.zero_stage, config.optim.lr) == (9, 2, 3e-4)
    (tmp_path / "base.yaml").write_text("base: over.yaml\n")
    with pytest.raises(UserError, match="its own base"):
        load_config(tmp_path / "over.yaml")


def test_accumulation_follows_from_the_global_batch_or_shows_the_arithmetic() -> None:
    """Guards against a global batch that is not the recipe's (512 instead of 1024 cost DeiT users 3 points)."""
    assert accumulation_steps(TrainConfig(global_batch_size=1024, micro_batch_size=64), 4) == 4
    with pytest.raises(UserError, match=r"64 x 3 processes = 192 .* 5\.333 accumulation steps"):
        accumulation_steps(TrainConfig(global_batch_size=1024, micro_batch_size=64), 3)
    with pytest.raises(UserError, match="set train.micro_batch_size to 8"):
        accumulation_steps(TrainConfig(global_batch_size=16, micro_batch_size=64), 2)


def test_readme_has_the_config_table() -> None:
    """Guards against a README that lists keys or defaults which are not true."""
    assert markdown_table() in (CONFIGS[0].parent.parent / "README.md").read_text()
