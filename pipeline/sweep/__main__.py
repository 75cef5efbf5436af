"""Train many runs from one file: a line of overrides each, compared on one page. The same command resumes a stopped sweep.

    pervit sweep --grid --config demo optim.lr=1e-3,5e-4 seed=0,1 > sweep.txt
    pervit sweep --jobs 2 sweep.txt
    pervit sweep --list sweep.txt

Words after FILE, --config CONFIG and dotted.key=value, apply to all runs; output_dir=DIR is the folder that holds theirs, by default
runs/ and the file's name. Finished runs are skipped, interrupted ones resume. Ctrl-C lets the runs save, then exits.
On a cluster: bash launch/sweep.slurm [options of sbatch] FILE
"""

import argparse
import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError

_PLAIN = r"[\w@+=:,./{}\[\]#-]+"
_NO_FILE = "a sweep requires a file with a line of overrides for each run, got none"


def main() -> int:
    if sys.argv[1:2] == ["--submit"]:
        return _submit(sys.argv[2:])
    parser = command_parser("pipeline.sweep", __doc__)
    add = parser.add_argument
    add("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    add("--processes", type=int, default=1, metavar="N", help="processes of each run, one for each of its GPUs (default: 1)")
    add("--list", action="store_true", help="check the file, print the progress of each run, and exit")
    add("--grid", nargs=argparse.REMAINDER, metavar="key=value,value", help="print the file for all combinations of values")
    add("--report", type=Path, metavar="DIR", help=argparse.SUPPRESS)  # of a submission, for launch/sweep.slurm
    add("file", type=Path, nargs="?", metavar="FILE", help="a line of overrides for each run")
    for_all = "for all runs, after --config CONFIG where the lines have none"
    add("words", nargs=argparse.REMAINDER, metavar="dotted.key=value", help=for_all)
    args = parser.parse_args()
    if args.grid is not None:
        print(grid(args.grid), end="")
        return 0
    if args.report is not None:
        from pipeline.sweep.job_array import report

        return report(args.report)
    if args.file is None:
        raise UserError(_NO_FILE, "pass it, or make one with --grid")
    for name in ("jobs", "processes"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(args, name)}", "correct it")
    from pipeline.sweep.lines import read_sweep
    from pipeline.sweep.states import table

    sweep = read_sweep(args.file, args.words)
    if args.list:
        print(table([(run.number, run.folder) for run in sweep.runs]))
        return 0
    from pipeline.sweep.one_machine import OneMachine

    return OneMachine(sweep, args.jobs, args.processes).train()


def _submit(words: list[str]) -> int:
    """``launch/sweep.slurm [options of sbatch] FILE [words for all runs]``."""
    options, at_once = [], None
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--jobs" or option.startswith("--jobs="):
            number = option.partition("=")[2] or (words.pop(0) if words else "")
            if not number.isascii() or not number.isdigit() or int(number) < 1:
                raise UserError(f"--jobs must be a number of at least 1, got {number!r}", "correct it")
            at_once = int(number)
        else:
            options.append(option)
    if not words:
        raise UserError(_NO_FILE, "pass it after the options of sbatch")
    from pipeline.sweep.job_array import submit
    from pipeline.sweep.lines import read_sweep

    file = Path(words[0])
    if options and not file.exists() and "=" not in options[-1]:
        remedy = f"if it is the value of {options[-1]}, write the two as one word, --name=value"
        raise UserError(f"{file} must be a file with a line of overrides for each run, got no such file", remedy)
    return submit(read_sweep(file, words[1:]), options, at_once)


def grid(words: Sequence[str]) -> str:
    """The file for ``--config CONFIG,CONFIG`` and ``key=value,value``: a line for each combination, the last key changing fastest; what
    has one value only goes into the line for all. Raises UserError: a word of another form, an empty value, or a combination that
    is not a valid config."""
    from pipeline.sweep.lines import CONFIG, join_config, parse_sweep

    common: list[str] = []
    axes: list[list[str]] = []
    words = list(join_config(words))
    for word in words:
        key, equals, text = word.partition("=")
        if key == CONFIG and not text:
            raise UserError(f"{CONFIG} requires a file or a name in configs/, got nothing", f"write {CONFIG} pervit_t")
        if not equals or not key or key.startswith("-") and key != CONFIG:
            raise UserError(f"--grid must have words key=value,value, got {word!r}", "write for example optim.lr=1e-3,5e-4")
        values = _values(text)
        if not all(values):
            raise UserError(f"{word} has an empty value between its commas", "correct it")
        choices = [f"{CONFIG} {shlex.quote(value)}" if key == CONFIG else f"{key}={value}" for value in values]
        # Brackets and commas, which a shell would have quoted, need no quotes in a file.
        choices = [word if key == CONFIG or re.fullmatch(_PLAIN, word) else shlex.quote(word) for word in choices]
        if len(set(choices)) < len(choices):
            raise UserError(f"{word} has a value twice", "take one out")
        if len(choices) > 1:
            axes.append(choices)
        else:
            common += choices
    if not axes:
        raise UserError("--grid must have a key with several values, got none", "write for example optim.lr=1e-3,5e-4 seed=0,1")
    lines = [" ".join(combination) for combination in itertools.product(*axes)]
    text = "".join(f"{line}\n" for line in ([f"all: {' '.join(common)}"] if common else []) + lines)
    if any(word.startswith(f"{CONFIG}=") for word in words):
        parse_sweep(Path("grid"), text, variables={})
    return text


def _values(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    if depth or quote:
        problem = f"{text} has a {'quote' if quote else 'bracket'} that is not closed, commas within it separate nothing"
        raise UserError(problem, "close it, and quote the word for the shell")
    return values


if __name__ == "__main__":
    run_command(main)
