"""A sweep's file: what its lines mean, what is refused, and by which sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config import flatten
from pipeline.errors import UserError
from pipeline.sweep.lines import Sweep, folder_name, parse_sweep, read_sweep

FILE = Path("my sweep.txt")


def parse(text: str, *words: str, **variables: str) -> Sweep:
    return parse_sweep(FILE, text, words, variables)


def test_a_file() -> None:
    """Guards against a comment, a quote or a blank line that becomes a run or changes one, and overrides in another order."""
    text = """\
# two learning rates, don't train longer

all: --config demo train.epochs=3   # for all
optim.lr=1e-3 seed=1 # it's the paper's
  seed=2 "data.crop_scale=[0.5, 1.0]"\t
--config pervit_s optim.lr=5e-4 train.epochs=4
--config=pervit_s
"""
    sweep = parse(text, "train.max_steps=7", "output_dir=runs/x", PERVIT_DATA="/s p", PERVIT_OUTPUT="elsewhere")
    assert (sweep.folder, [run.number for run in sweep.runs], [run.line for run in sweep.runs]) == (
        Path("runs/x"),
        [1, 2, 3, 4],
        [4, 5, 6, 7],
    )
    assert [run.config_file for run in sweep.runs] == ["demo", "demo", "pervit_s", "pervit_s"]
    assert sweep.runs[0].overrides == (
        "data.path=/s p", "train.epochs=3", "train.max_steps=7", "optim.lr=1e-3", "seed=1", "output_dir=runs/x/optim.lr=1e-3,seed=1",
    )  # fmt: skip
    configs = [run.config for run in sweep.runs]
    assert [(each.train.epochs, each.train.max_steps, each.data.path) for each in configs] == [
        (3, 7, "/s p"), (3, 7, "/s p"), (4, 7, "/s p"), (3, 7, "/s p"),
    ]  # fmt: skip
    assert configs[1].data.crop_scale == (0.5, 1.0) and configs[0].data.crop_scale == (0.6, 1.0)
    assert all(Path(each.output_dir) == run.folder == sweep.folder / run.name for each, run in zip(configs, sweep.runs))
    assert sweep.runs[3].name == "pervit_s"


def test_where_the_folders_are() -> None:
    """Guards against two sweeps that share a folder because none was named, and a name that is ignored."""
    assert parse("--config demo").folder == Path("runs/my sweep")
    assert parse("--config demo", PERVIT_OUTPUT="/o").folder == Path("/o")
    assert parse("all: output_dir=/a\n--config demo", PERVIT_OUTPUT="/o").folder == Path("/a")
    assert flatten(parse("all: output_dir=/a\n--config demo").runs[0].config)["output_dir"] == "/a/demo"


def test_a_folders_name_comes_from_its_line_alone() -> None:
    """Guards against a run that begins again in a new folder because a line was added above, or its words were moved."""
    before = {run.name for run in parse("all: --config demo\nseed=1 optim.lr=1e-3\nseed=2").runs}
    after = [run.name for run in parse("all: --config demo train.epochs=9\nseed=0\n# x\noptim.lr=1e-3 seed=1\nseed=2").runs]
    assert before == {"optim.lr=1e-3,seed=1", "seed=2"} and before < set(after)
    assert folder_name("ablations/pervit_table5_lrn", ["seed=0"]) == "pervit_table5_lrn,seed=0"


def test_names_that_a_folder_cannot_have() -> None:
    """Guards against a path in a value that makes a folder of folders, and two values that become one name."""
    first, second = (folder_name("", [f"train.init_from={path}"]) for path in ("/a/b c", "/a/b:c"))
    assert first != second
    for name in (first, second):
        assert re.fullmatch(r"train.init_from=a_b_c-[0-9a-f]{8}", name)
    long = [folder_name("", [f"train.init_from={'x' * 300}{end}"]) for end in "ab"]
    assert len(set(long)) == 2 and max(map(len, long)) < 140


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "my sweep.txt must have a line for each run, got none"),
        ("# nothing\nall: --config demo\n", "my sweep.txt must have a line for each run, got none"),
        (
            "all: --config demo\n\nseed=0\ntrain.epoch=3",
            "my sweep.txt, line 4: override 'train.epoch=3': unknown key 'train.epoch'",
        ),
        ("all: --config demo\nseed=a", "my sweep.txt, line 2: "),
        ("all: --config demo\nseed", "my sweep.txt, line 2: override 'seed' is not of the form"),
        ("all: --config demo\noutput_dir=runs/x", "my sweep.txt, line 2 sets output_dir, which a sweep derives"),
        ("all: --config demo\nseed=1\n\nseed=1", "my sweep.txt, line 4 and line 2 would both train in runs/my sweep/seed=1"),
        ("all: --config demo\noptim.lr=1e-3 seed=1\nseed=1 optim.lr=1e-3", "line 3 and line 2 would both train in"),
        ("all: --config demo\noptim.lr=1e-3\noptim.lr=0.001", "line 3 is the same run as line 2"),
        ("all: --config demo\nmodel.name=pervit_x", "line 2: model.name must be timm:NAME, module:build or one of convit_b"),
        ("all: --config demo\nmodel.switches.cpee=false", "line 2: model.switches: unknown switch 'cpee'"),
        ("all: --config demo\nseed=1 seed=2", "my sweep.txt, line 2 sets seed twice"),
        ("all: --config demo\n'seed=1", "my sweep.txt, line 2 has a quote that is not closed"),
        ("all: --config demo\nseed=1 \\\n  optim.lr=1e-3", "my sweep.txt, line 2 must not end with a backslash"),
        (
            "all: --config demo\ndata.path=$HOME/x",
            "my sweep.txt, line 2 must not have $HOME, which only a shell replaces, got 'data.path=$HOME/x'",
        ),
        (
            "all: --config demo data.path=~/x\nseed=1",
            "my sweep.txt, line 1 must not have ~, which only a shell replaces, got 'data.path=~/x'",
        ),
        ("all: --config demo\nseed=%a", "my sweep.txt, line 2 must not have %a, which a job array replaces, got 'seed=%a'"),
        (
            "all: --config demo\n--jobs=2 seed=1",
            "my sweep.txt, line 2 must have words --config CONFIG and key=value, got '--jobs=2'",
        ),
        (
            "all: --config demo\n--config",
            "my sweep.txt, line 2 must have one --config with a file or a name in configs/, got --config without a config",
        ),
        ("seed=1", "my sweep.txt, line 1 must have a config, got none"),
        ("--config demoo seed=1", "my sweep.txt, line 1: config demoo does not exist"),
        ("\nall: --config demoo\nseed=1", "my sweep.txt, line 2: config demoo does not exist"),
        ("seed=1\nall: --config demo train.epoch=1", "my sweep.txt, line 2: override 'train.epoch=1': unknown key"),
        ("all: --config demo\nall: seed=1", "my sweep.txt, line 2 is a second 'all:', after that of my sweep.txt, line 1"),
    ],
)
def test_a_mistake_is_named_with_its_line(text: str, said: str) -> None:
    """Guards against a mistake that the last of a hundred tasks tells after a day in the queue."""
    with pytest.raises(UserError) as error:
        parse(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "demo", "train.epoch=1"], "the words after my sweep.txt: override 'train.epoch=1': unknown key"),
        (["--config", "demoo"], "the words after my sweep.txt: config demoo does not exist"),
        (["seed=3", "--config", "demo"], "my sweep.txt, line 1 sets seed, and so do the words after the file"),
        (
            ["--config", "demo", "--list"],
            "the words after my sweep.txt must have words --config CONFIG and key=value, got '--list'",
        ),
        (["--config", "demo", "output_dir="], "output_dir must name the folder of a sweep's runs, got nothing"),
        (["--config", "demo", "output_dir=/x/%a"], "must not have %a, which a job array replaces, got 'output_dir=/x/%a'"),
    ],
)
def test_a_mistake_in_the_command(words: list[str], said: str) -> None:
    """Guards against a line that is blamed for what the command says."""
    with pytest.raises(UserError) as error:
        parse("seed=1", *words)
    assert said in str(error.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    """Guards against a traceback for a wrong path."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path / "no", "no such file"),
        (tmp_path, "a folder"),
        (binary, "something that is not text in UTF-8"),
    ):
        with pytest.raises(UserError, match=f"{path} must be a file .*, got {said}"):
            read_sweep(path)
    file = tmp_path / "windows.txt"
    file.write_bytes("\ufeffall: --config demo\r\nseed=1\r\n".encode())
    assert [run.name for run in read_sweep(file).runs] == ["seed=1"]


@pytest.mark.parametrize("held", ["metrics.jsonl", "config.yaml"])
def test_the_folder_of_a_run_is_none_for_a_sweep(held: str, tmp_path: Path) -> None:
    """Guards against runs inside of a run, of which a report would see the outer one alone."""
    (tmp_path / held).touch()
    with pytest.raises(UserError, match="got the folder of a run"):
        parse("--config demo", PERVIT_OUTPUT=str(tmp_path))
