"""README.md and docs/ are true: their commands are accepted, their links lead somewhere, the files they name are there."""

from __future__ import annotations

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from pipeline.config.__main__ import markdown_page
from pipeline.models.registry import _MODULE_OF, list_models
from support.doc_commands import DOCUMENTS, REPOSITORY, Command, check, find_commands

PAGES = [*DOCUMENTS, "AGENTS.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]
COMMANDS = [command for document in DOCUMENTS for command in find_commands(document)]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_a_command_is_accepted(command: Command) -> None:
    """Guards against a documented module, option, config key, switch or batch size that there is not."""
    check(command.words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python -m pipeline.nothing", "not a command of the package"),
        ("pervit evaluate --chekpoint runs/x --data d", "--chekpoint"),
        ("pervit-shard --from images --output data", "--source"),
        ("pervit evaluate --data d", "--checkpoint"),
        ("pervit trian --config demo", "no command 'trian'"),
        ("pervit train --config pervit_z", "did you mean"),
        ("pervit train --config pervit_t train.epoch=1", "unknown key 'train.epoch'"),
        ("pervit train --config pervit_t model.switches.cpee=false", "cpee"),
        ("bash launch/local.sh 3 -- pipeline.train --config pervit_t", "1024"),
        ("torchrun --nnodes 3 --nproc-per-node 8 -m pipeline.train --config pervit_t", "1024"),
        ("accelerate launch --num_processes 2 -m pipeline.train --config pervit_t train.epoch=1", "unknown key 'train.epoch'"),
        ("sbatch --nodes=4 launch/pervit_m.slurm train.micro_batch_size=48", "1024"),
        ("sbatch --nodez=4 launch/pervit_m.slurm", "unknown options of sbatch"),
        ("sbatch launch/pervit_x.slurm", "pervit_x.slurm"),
        ("sbatch launch/train.slurm configs/convit_z.yaml", "did you mean"),
        ("bash launch/sweep.sh --jobz 2 sweep.txt", "--jobz"),
        ("bash launch/sweep.slurm --nodez=2 sweep.txt", "unknown options of sbatch"),
        ("bash launch/sweep.sh sweep.txt train.epoch=2", "unknown key 'train.epoch'"),
        ("bash launch/sweep.sh --grid --config demo train.seed=0,1 > sweep.txt", "unknown key 'train.seed'"),
        ("pervit plan --config pervit_m --nodes 2 --gpus-per-node 8", "1024"),
        ("bash launch/pervit_m.slurm --plan --nodes 2", "1024"),
        ("make nothing", "nothing"),
        ("pip install '.[nothing]'", "no extra"),
        ("python3 -m pipeline.train", "not known here"),
    ],
)
def test_a_wrong_command_is_found(text: str, said: str) -> None:
    """Guards against a check that lets everything through."""
    with pytest.raises((ValueError, OSError)) as error:
        check(tuple(shlex.split(text)))
    assert said in str(error.value)


def test_commands_are_in_blocks_that_are_checked() -> None:
    """Guards against a command that the checks above do not see because its block is not marked as bash."""
    assert len(COMMANDS) > 30
    programs = r"(python|bash|torchrun|accelerate|sbatch|make|pip|uv|source|pervit[\w-]*|curl) "
    for document in DOCUMENTS:
        unchecked = re.sub(r"^```bash\n.*?^```", "", (REPOSITORY / document).read_text(), flags=re.DOTALL | re.MULTILINE)
        for block in re.findall(r"^```\w*\n(.*?)^```", unchecked, re.DOTALL | re.MULTILINE):
            assert not re.search(rf"^\s*{programs}", block, re.MULTILINE), document


def anchors(page: Path) -> set[str]:
    """What a code host makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Guards against a link to a page or a heading that was renamed."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (REPOSITORY / page).read_text())
    for target, anchor in links:
        path = (REPOSITORY / page).parent / target if target else REPOSITORY / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_are_named_are_there(page: str) -> None:
    """Guards against a page that sends its reader to a module which was moved. Paths may leave out the first folders."""
    folders = ("pipeline", "data_prep", "configs", "examples", "launch", "docs", "tests", "benchmarks")
    files = [*REPOSITORY.glob("*.md"), *(path for folder in folders for path in (REPOSITORY / folder).rglob("*.*"))]
    there = [f"/{path.relative_to(REPOSITORY).as_posix()}" for path in files]
    named = set(re.findall(r"(?<![\w/*.-])[a-z][\w/]*\.(?:py|sh|slurm|md|yaml)\b", (REPOSITORY / page).read_text()))
    named = {name for name in named if not re.search("[A-Z]", name.rpartition("/")[2])} - {
        "other.yaml",
        "config.yaml",
    }  # placeholders, files of runs
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


def test_the_page_of_keys_is_generated() -> None:
    """Guards against keys or defaults that are not true. Its first line has the command that writes it again."""
    assert (REPOSITORY / "docs" / "config.md").read_text() == markdown_page()


def test_the_readme_counts_the_models() -> None:
    """Guards against numbers of models and families that the registry has outgrown."""
    families = set(_MODULE_OF.values())
    text = " ".join((REPOSITORY / "README.md").read_text().split())
    assert f"{len(list_models())} models of {len(families)} families" in text


def test_the_drawn_floors_are_those_that_are_checked() -> None:
    """Guards against a drawing in ARCHITECTURE.md of how the packages once were."""
    drawn = next(block for block in re.findall(r"```\n(.*?)```", (REPOSITORY / "ARCHITECTURE.md").read_text(), re.DOTALL))
    layers = (REPOSITORY / "pyproject.toml").read_text().partition("\nlayers = [\n")[2].partition("\n]")[0]
    checked = [set(re.findall(r"\w+", line)) for line in re.findall(r'"([^"]*)"', layers)]
    lines = [line for line in drawn.splitlines() if "─" not in line]
    names = [set(line[10:].split()) for line in lines]
    names[:2] = [(names[0] | names[1]) - {"pervit"} | {"__main__"}]  # the commands
    assert names == checked


def test_raw_rows_belong_to_a_result() -> None:
    """Guards against rows in benchmarks/results that no page of results names, and pages that name rows which are not there."""
    text = "".join(page.read_text() for page in (REPOSITORY / "docs" / "results").glob("*.md"))
    patterns = set(re.findall(r"benchmarks/results/([\w*]*[a-z_][\w*]*\.(?:csv|jsonl))", text))
    files = {path.name for path in (REPOSITORY / "benchmarks" / "results").iterdir()}
    assert files and {name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
    assert {pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)} == set()


def test_the_readme_is_short() -> None:
    """Guards against a front page that grows until nobody reads it to its end."""
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 120
