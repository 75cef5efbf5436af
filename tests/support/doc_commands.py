"""Check every command of README.md and docs/: each line of their ```bash blocks.

    python tests/support/doc_commands.py          modules, options, config keys, switches and batch sizes are parsed, nothing runs
    python tests/support/doc_commands.py --run    and what needs one machine runs, small, on the digits, in a temporary folder

What cannot run there is listed with what it needs: Slurm, an installation, or somebody who ends it.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

from examples.detection.config import DetectionConfig
from pipeline.__main__ import MODULES, home
from pipeline.command_line import run_command
from pipeline.config import AUTO, accumulation_steps, fitting_micro_batches, load_config, load_config_as, section_from_dict
from pipeline.errors import UserError
from pipeline.sweep.__main__ import grid
from pipeline.sweep.lines import parse_sweep

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = ["README.md", *sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))]
DOCUMENTS += sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "examples").rglob("*.md"))
SCRIPTS = set(re.findall(r'^(pervit-[\w-]+) = "', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE))
# Modules that documents call and that are no commands of ``pervit``.
OTHER_MODULES = ("examples.detection.train", "examples.detection.config", "data_prep.make_demo_dataset")
SBATCH = {"account", "array", "cpus-per-task", "gpus-per-node", "job-name", "nodes", "ntasks-per-node", "output", "partition"}
SWEEP = ("launch/sweep.sh", "launch/sweep.slurm")
NEEDS = {
    **dict.fromkeys(("sbatch", "eval", "launch/sweep.slurm"), "a Slurm cluster"),
    "launch/sweep.sh": "a file that a shell writes",
    **dict.fromkeys(("make", "pip", "uv", "source"), "an installation"),
    **dict.fromkeys(("tail", "tensorboard"), "somebody who ends it"),
    **dict.fromkeys(("docker", "apptainer", "enroot"), "itself"),
    **dict.fromkeys(("curl", "hf"), "a network"),
    **dict.fromkeys(("--nnodes", "WORLD_SIZE=2"), "a second process like it"),
    "accelerate": "itself",
    **dict.fromkeys(("wandb", "mlflow", "trackio"), "a tracker's client, which is not part of `make install`"),
    **dict.fromkeys(("--set", "--classes"), "ImageNet's other sets, or its classes"),
    "pervit_t.onnx": "the extra onnx",
    "train.teacher=torchvision:regnet_y_16gf": "its weights",
    "data.size_schedule=[[0, 128], [100, 176], [200, 224]]": "images of 224 pixels",
    **dict.fromkeys(
        ("model.name=timm:resnet18", "timm_swin_t", "timm:swin_tiny_patch4_window7_224"),
        "timm, which is not part of `make install`",
    ),
}
# A run of seconds, whatever the config; a key that the command states keeps its value.
SMALL = "model.num_classes=10 model.image_size=32 train.global_batch_size=16 train.micro_batch_size=8 train.max_steps=2"
SMALL += " data.num_threads=1 checkpoint.every_steps=1"
STARTED = ("pervit_t", "pervit_m", "convit_b")  # runs that commands take as there
STANDS_FOR = {"/path/to/imagenet": "demo/images", "folder/of/images": "demo/images/val", "/nvme/pervit": "demo/cache"}


@dataclass(frozen=True)
class Command:
    """One command of a document; a line with ``&&`` has several."""

    place: str  # file:line
    words: tuple[str, ...]


class _Parsed(BaseException):
    """Carries the arguments out of a command, past whatever it catches."""


def find_commands(document: str) -> Iterator[Command]:
    """Every command of the ```bash blocks, in order."""
    text = (REPOSITORY / document).read_text()
    for block in re.finditer(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        first = text[: block.start(1)].count("\n") + 1
        lines = block[1].replace("\\\n", "\0").split("\n")  # a continued line is one
        for number, line in enumerate(lines):
            place = f"{document}:{first + number + ''.join(lines[:number]).count(chr(0))}"
            words = shlex.split(line.replace("\0", " "), comments=True)
            for part in " ".join(map(shlex.quote, words)).split("'&&'"):
                if part.strip():
                    yield Command(place, tuple(shlex.split(part)))


def called_module(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The module that a command runs, and its arguments; None if it is none of ``python -m``, ``pervit`` and ``pervit-train``.

    Raises:
        ValueError: ``pervit`` has no such command.
    """
    program, *rest = words
    if program == "python" and rest[0] == "-m":
        return rest[1], rest[2:]
    if program in SCRIPTS:
        return MODULES[program.removeprefix("pervit-")], rest
    if program != "pervit":
        return None
    if rest[0] not in MODULES:
        raise ValueError(f"pervit has no command {rest[0]!r}")
    return MODULES[rest[0]], rest[1:]


def check(words: tuple[str, ...]) -> None:
    """See that a command would be accepted, as far as that shows without running it.

    Raises:
        ValueError: it would not (a :class:`UserError` is one).
    """
    words = words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]  # variables come first
    program, *rest = words
    if called := called_module(words):
        _check_module(*called)
    elif words[:2] == ("bash", "launch/local.sh"):
        if rest[2] != "--":
            raise ValueError(f"{rest[2]!r} instead of -- after the number of processes")
        _check_module(rest[3], rest[4:], processes=int(rest[1]))
    elif program in ("torchrun", "accelerate"):
        at, counts = words.index("-m"), ("--nnodes", "--nproc-per-node", "--num_processes")
        processes = math.prod(int(words[words.index(option) + 1]) for option in counts if option in words)
        _check_module(words[at + 1], list(words[at + 2 :]), processes)
    elif words[0] == "bash" and rest[0] in SWEEP:
        _check_sweep(rest)
    elif program == "sbatch" or (program == "bash" and "--plan" in rest):
        _check_sbatch(rest)
    elif program == "make":
        made = subprocess.run(["make", "--dry-run", *rest], cwd=REPOSITORY, capture_output=True, text=True)
        if made.returncode:
            raise ValueError(made.stderr.strip())
    elif program in ("pip", "uv"):
        extras = set(re.findall(r"\w+", "".join(re.findall(r"\[([\w,]+)\]", " ".join(rest)))))
        declared = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
        if extras - set(declared):
            raise ValueError(f"no extra {extras - set(declared)} in pyproject.toml")
    elif program == "eval":
        script = REPOSITORY / re.findall(r"launch/\S+", rest[0])[0]
        subprocess.run(["bash", "-n", script], check=True)
    elif program not in NEEDS:
        raise ValueError(f"{program} is not known here: add it to tests/support/doc_commands.py")


def _check_module(module: str, arguments: list[str], processes: int = 1) -> None:
    if module not in (*MODULES.values(), *OTHER_MODULES):
        raise ValueError(f"{module} is not a command of the package")
    options = _parse(home(module), arguments)
    if module == "examples.detection.train":
        detection = load_config_as(DetectionConfig, options.config, options.overrides)
        accumulation_steps(detection.for_package(categories=80).train, processes)
    if module == "pipeline.plan":
        from pipeline.plan import subject_of

        subject = subject_of(options)
        accumulation_steps(subject.config.train, options.nodes * options.gpus_per_node, subject.config.augment.unit)
    if module == "pipeline.train":
        config = load_config(options.config, options.overrides)
        if config.train.micro_batch_size == AUTO:
            fitting_micro_batches(config.train, processes, config.augment.unit)
        else:
            accumulation_steps(config.train, processes, config.augment.unit)
        from pipeline.models import model_entry  # takes seconds

        if find_spec("timm") or not config.model.name.startswith("timm:"):
            section_from_dict(model_entry(config.model.name).switches, config.model.switches, key="model.switches")


def _parse(module: str, arguments: list[str]) -> argparse.Namespace:
    """What a command's own parser makes of the arguments; the command ends there."""
    kinds = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_intermixed_args")}

    def leaving(parse: Callable[..., argparse.Namespace]) -> Callable[[argparse.ArgumentParser], None]:
        def leave(parser: argparse.ArgumentParser) -> None:
            raise _Parsed(parse(parser, arguments))

        return leave

    said = io.StringIO()
    replaced = {name: leaving(parse) for name, parse in kinds.items()}
    with patch.multiple(argparse.ArgumentParser, **replaced), redirect_stderr(said):
        try:
            run_command(import_module(module).main)
        except _Parsed as parsed:
            return parsed.args[0]
        except SystemExit:
            pass
    raise ValueError(said.getvalue().strip().rpartition("\n")[2] or f"{module} took no arguments")


def _check_sbatch(words: list[str]) -> None:
    position = next(i for i, word in enumerate(words) if not word.startswith("--"))
    options = dict(word.removeprefix("--").split("=", 1) for word in words[:position])
    if unknown := options.keys() - SBATCH:
        raise ValueError(f"unknown options of sbatch: {unknown}")
    script, arguments = Path(words[position]), [word.replace("%a", "0") for word in words[position + 1 :]]
    size = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (REPOSITORY / script).read_text(), re.MULTILINE)) | options
    if script.stem == "shard_imagenet":
        _check_module("data_prep.shard_imagenet", arguments)
    else:
        config = arguments.pop(0) if script.stem in ("train", "detection", "doctor") else f"configs/{script.stem}.yaml"
        processes = 1 if script.stem == "doctor" else int(size["nodes"]) * int(size["ntasks-per-node"])
        module = "examples.detection.train" if script.stem == "detection" else "pipeline.train"
        if "--plan" in arguments:
            module = "pipeline.plan"
            arguments.remove("--plan")
            arguments = [
                "--nodes",
                size["nodes"],
                "--gpus-per-node",
                size["ntasks-per-node"],
                *arguments,
            ]  # as launch/plan_job.sh
        _check_module(module, ["--config", config, *arguments], processes)


def _check_sweep(words: list[str]) -> None:
    """Of a file such as the pages' ``--grid`` writes."""
    if ">" in words:
        words = words[: words.index(">")]
    if words[1] == "--grid":
        grid(words[2:])
        return
    file = next(i for i, word in enumerate(words) if word.endswith(".txt"))
    options = words[1:file]
    if words[0] == "launch/sweep.slurm":
        unknown = {word.removeprefix("--").partition("=")[0] for word in options} - SBATCH - {"jobs", "time"}
        if unknown:
            raise ValueError(f"unknown options of sbatch: {unknown}")
    else:
        _parse("pipeline.sweep.__main__", words[1:])
    parse_sweep(Path(words[file]), "all: --config demo\noptim.lr=1e-3 seed=0\n", words[file + 1 :], {})


def runnable(words: tuple[str, ...]) -> list[str]:
    """The command for the temporary folder: the same, with small sizes, at most two processes and data that are there."""
    words = tuple(STANDS_FOR.get(word, word) for word in words)
    if called := called_module(words):
        words = ("python", "-m", called[0], *called[1])
    if words[:2] == ("bash", "launch/local.sh"):
        words = (*words[:2], str(min(2, int(words[2]))), *words[3:])
    if words[0] == "torchrun":
        words = (*words[:2], str(min(2, int(words[2]))), *words[3:])
    if "pipeline.train" in words:
        stated = {word.partition("=")[0] for word in words}
        words += tuple(word for word in SMALL.split() if word.partition("=")[0] not in stated)
    if "export" in words:
        words += ("--force",)  # two pages show the same export
    return list(words)


def prepare(folder: Path) -> None:
    """A copy of the repository with a few digits as every data set and a run of two steps for each of ``STARTED``."""
    files = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    run("python -m data_prep.make_demo_dataset --output all".split(), folder)
    for split, count in (("train", 8), ("val", 2)):
        for digit in range(10):
            for image in sorted((folder / "all" / split / str(digit)).iterdir())[:count]:
                (folder / "demo" / "images" / split / str(digit)).mkdir(parents=True, exist_ok=True)
                shutil.copy(image, folder / "demo" / "images" / split / str(digit))
    for digit, name in enumerate(("cat", "dog")):
        shutil.copytree(folder / "all" / "train" / str(digit), folder / "photos" / name)
    run("python -m data_prep.shard_imagenet --source demo/images --output demo/shards".split(), folder)
    (folder / "data").mkdir()
    (folder / "data" / "cifar10").symlink_to("../demo/shards")  # data/imagenet is written by the README's own command
    for name in STARTED:
        command = ("python", "-m", "pipeline.train", "--config", f"configs/{name}.yaml", "data.path=demo/shards")
        if wrong := run(runnable(command), folder):
            raise RuntimeError(wrong)


def run(words: list[str], folder: Path) -> str:
    """Run a command; what it said last if it failed, else nothing."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    return f"exit code {done.returncode}: {done.stderr.strip()[-400:]}" if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="also run what can run on one machine")
    execute = parser.parse_args().run
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if execute:
            prepare(folder)
        for command in (command for document in DOCUMENTS for command in find_commands(document)):
            started = time.monotonic()
            try:
                check(command.words)
                need = next((NEEDS[word] for word in command.words if word in NEEDS), None)
                need = need or ("COCO" if "examples.detection.train" in command.words else None)
                wrong = run(runnable(command.words), folder) if execute and not need else ""
                verdict = (
                    f"parsed; needs {need}" if need else f"ran, {time.monotonic() - started:.0f} s" if execute else "parsed"
                )
            except (UserError, ValueError, OSError, subprocess.SubprocessError) as error:
                wrong = str(error)
            failures += bool(wrong)
            print(f"{command.place:22} {'WRONG: ' + wrong if wrong else verdict:32} {shlex.join(command.words)}", flush=True)
    print(f"{failures} of the commands are wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
