"""docs/papers.md: every command is accepted, every table and config it names exists, and no table of ours is left out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipeline.analysis.session import CHAPTERS
from pipeline.config.loading import shipped_names
from pipeline.config.tables import ABLATIONS, paper_tables
from pipeline.models import list_models
from support.doc_commands import REPOSITORY, check

PAGE = (REPOSITORY / "docs" / "papers.md").read_text()
COMMANDS = sorted(set(re.findall(r"`(pervit [a-z].*?)`", PAGE)) - {"pervit report --table NAME", "pervit analyze"})
CONFIGS = {Path(name).name for name in shipped_names()}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_accepted(command: str) -> None:
    """Guards against a command with an option, a table, a figure, a config or a model that there is not."""
    words = shlex.split(command)
    check(tuple(words))
    if "--table" in words:
        assert words[words.index("--table") + 1] in paper_tables()
    if "--only" in words:
        named = words[words.index("--only") + 1 : words.index("--output")]
        assert set(named) <= {figure.name for chapter in CHAPTERS for figure in chapter.declared}
    runs = {Path(word).name for word in words if word.startswith("runs/")}
    assert runs <= CONFIGS | {f"{name}.json" for name in CONFIGS}
    if words[1] in ("throughput", "flops", "models"):
        assert {word for word in words[2:] if not word.startswith("-") and "." not in word} <= set(list_models())


def test_no_table_is_missing() -> None:
    """Guards against a table that can be filled and that nobody finds, and rows of the page without an answer."""
    for name in paper_tables():
        assert f"--table {name} " in PAGE, name
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert len(rows) > 60
    for row in rows:
        what, _, answer = (cell.strip() for cell in row.strip("|").split("|"))
        assert what and re.search(r"drawn|filled|diagrams|layout|recipe|in words", answer), row


def test_every_row_can_be_tested_and_trained() -> None:
    """Guards against a switch of the test that the row's model does not have."""
    from pipeline.config import load_config
    from pipeline.models import model_entry

    tested = [row for table in paper_tables().values() for row in table.rows if row.test]
    assert len(tested) == 8
    for row in tested:
        model = load_config(str(row.config).removeprefix(ABLATIONS)).model
        assert row.test.keys() <= model_entry(model.name).switches.model_fields.keys()
