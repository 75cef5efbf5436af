"""The configs for parts of ImageNet show as many images as those for all of it, and docs/models.md says so."""

from __future__ import annotations

import re

import pytest

from pipeline.config import load_config
from pipeline.config.tables import row_names
from pipeline.stream.schedule import make_schedule
from support.launching import REPOSITORY

IMAGES = 1_281_167  # of ImageNet-1k's train split
PAPERS = r"(convit_table2|pervit_table4|posmlp_figure1_f)_"


def listed() -> list[tuple[str, int, int, int]]:
    """(config, percent, epochs, million images seen) of every config in the table of docs/models.md."""
    text = (REPOSITORY / "docs" / "models.md").read_text()
    section = text.split("## Sample efficiency")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) % \| (\d+) \| (\d+) M \| (.*) \|$", section, re.MULTILINE)
    return [
        (name, int(percent), int(epochs), int(images))
        for percent, epochs, images, names in rows
        for name in re.findall(r"`(\w+)`", names)
    ]


@pytest.mark.parametrize(("name", "percent", "epochs", "images"), listed(), ids=lambda value: str(value))
def test_a_part_is_shown_as_often_as_the_table_says(name: str, percent: int, epochs: int, images: int) -> None:
    """Guards against a point of a curve that trains longer or shorter than the others, and on another part than its name says."""
    config = load_config(f"ablations/{name}" if "_table" in name or "_figure" in name else name)
    assert config.data.path == ("data/imagenet" if percent == 100 else f"data/imagenet_{percent:02d}")
    subset = percent / 100  # that --subset wrote
    schedule = make_schedule(config, round(subset * IMAGES), subset)
    assert schedule.epochs == pytest.approx(epochs)
    seen = schedule.samples(schedule.last_step)
    full = (300 if images == 384 else 60) * IMAGES
    assert seen == pytest.approx(full, rel=4e-3)  # an epoch is cut to whole 256 images where views repeat: 0.2 % of 5 %
    assert round(full / 1e6) == images


def test_the_table_lists_every_config_of_the_three_papers() -> None:
    """Guards against a part that is added and that nobody finds, and against a config that is listed twice."""
    names = [name for name, *_ in listed()]
    there = [stem for name in row_names() if re.match(PAPERS, stem := name.removeprefix("ablations/"))]
    assert len(names) == len(set(names)) and set(there) <= set(names)
    assert {"deit_s", "convit_s", "pervit_s", "posmlp_table1_gmlp_sgu"} <= set(names)
