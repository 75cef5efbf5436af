"""Submit all runs of a sweep as a job array, and its report as the job that waits for it.

A submission is a folder ``SWEEP/submitted/TIME`` with a copy of the file and, in ``tasks/NUMBER``, the words of each run: the config,
then the overrides, one a line, so that the job script reads them without Python. A task runs what was submitted, whatever becomes of
the file. The name of that folder in a job's command tells which runs wait in Slurm's queue.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import replace_text
from pipeline.sweep.lines import Sweep
from pipeline.sweep.states import LOGS, REPORT, check_batches, is_finished, make_report, table

SCRIPT = Path("launch", "sweep.slurm")
TASK = "--task"
_SUBMITTED, _TASKS = "submitted", "tasks"
# Options of sbatch that say where a job may run, which the report's job takes over; the others are the size of a training.
_WHERE = ("account", "partition", "qos", "reservation", "clusters", "wckey")
_SHORT = {"-A": "account", "-p": "partition", "-q": "qos", "-M": "clusters", "-J": "job-name", "-o": "output", "-a": "array"}
_SHORT |= {"-N": "nodes", "-n": "ntasks"}
_OURS = ("array", "parsable", "wrap", "wait", "test-only")


def submit(sweep: Sweep, options: Sequence[str], at_once: int | None) -> int:
    """Submit what is neither finished nor in the queue, and the report; returns the exit code. ``options``: of ``sbatch`` for each run, as
    ``--name=value``. ``at_once``: how many tasks may run at a time; None: as many as Slurm starts. Raises UserError: no Slurm, too many
    runs, a batch that the processes cannot share, or ``sbatch`` refuses. Nothing is submitted then."""
    if shutil.which("sbatch") is None:
        remedy = f"on one machine: pervit sweep {sweep.file}"
        raise UserError("a job array requires Slurm, got no sbatch on the PATH", remedy)
    if not SCRIPT.is_file():
        problem = f"a job array must be submitted from the repository's root, got {Path.cwd()} without {SCRIPT}"
        raise UserError(problem, "go there")
    options = _check_options(options)
    if (processes := _processes(options)) is not None:
        check_batches(sweep, processes, "; before the file, --nodes, --gpus-per-node and --ntasks-per-node say how many")
    queued = _in_the_queue(sweep)
    finished = [run for run in sweep.runs if is_finished(run)]
    todo = [run for run in sweep.runs if run not in finished and os.path.abspath(run.folder) not in queued]
    asked = _run("scontrol", "show", "config")
    size = re.search(r"^MaxArraySize\s*=\s*(\d+)", asked.stdout, re.MULTILINE)
    if asked.returncode != 0 or size is None:
        problem = f"scontrol does not tell Slurm's MaxArraySize ({_last(asked.stderr)})"
        raise UserError(problem, "try again when its controller is there")
    limit = int(size[1])
    if todo and todo[-1].number >= limit:
        tasks = f"the tasks of a job array are numbered to {limit - 1} here (Slurm's MaxArraySize is {limit})"
        raise UserError(f"{sweep.file} has {len(sweep.runs)} runs, but {tasks}", "split the file")
    submission = _write_submission(sweep)
    arrays = sorted(set(queued.values()), key=int)
    name, logs = re.sub(r"[^\w.-]+", "_", sweep.folder.name), str(sweep.folder / LOGS).replace("%", "%%")
    if todo:
        consecutive = groupby(enumerate(run.number for run in todo), key=lambda pair: pair[1] - pair[0])
        parts = [[number for _, number in pairs] for _, pairs in consecutive]  # 1, 2, 3, 5 are 1-3,5
        ranges = ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
        indices = ranges + (f"%{at_once}" if at_once else "")
        own = [f"--array={indices}", str(SCRIPT), TASK, str(submission)]
        try:
            array = _sbatch(f"--job-name={name}", f"--output={logs}/%A_%a.out", *options, *own)
        except UserError:
            shutil.rmtree(submission)
            raise
        arrays.append(array)
        log = f"{sweep.folder / LOGS}/{array}_TASK.out"
        print(f"job array {array}: {len(todo)} of {len(sweep.runs)} runs, tasks {indices}, logs {log}")
    for what, count in (("finished already", len(finished)), ("in the queue already", len(queued))):
        if count:
            print(f"{what}: {count} of {len(sweep.runs)} runs", flush=True)
    after = f"--dependency=afterany:{':'.join(arrays)}"
    where = [option for option in options if option.removeprefix("--").partition("=")[0] in _WHERE]
    own = [f"--job-name={name}-report", *"--nodes=1 --ntasks=1 --mem=4G --time=01:00:00 --requeue --open-mode=append".split()]
    own += [f"--output={logs}/report-%j.out", *([after] if arrays else []), *where]
    try:
        report = _sbatch(*own, f"--wrap=exec bash {SCRIPT} --report {shlex.quote(str(submission))}")
    except UserError as error:
        folders = shlex.join(str(run.folder) for run in sweep.runs)
        remedy = f"when they have ended, run: pervit report {folders} --output {sweep.folder / REPORT}"
        raise UserError(f"the runs are submitted, but not their report: {error.problem}", remedy) from None
    print(f"job {report}: the report, when all have ended: {sweep.folder / REPORT}")
    return 0


def report(submission: Path) -> int:
    """The last job of a sweep: how its runs have ended, in the log, and the page that compares them."""
    tasks = submission / _TASKS
    if not tasks.is_dir():
        raise UserError(f"--report must be a submission, SWEEP/{_SUBMITTED}/TIME, got {submission}", "correct the path")
    numbers = sorted(int(path.name) for path in tasks.iterdir())
    folders = [_folder_of(tasks / str(number)) for number in numbers]
    print(table(list(zip(numbers, folders))), flush=True)
    return make_report(folders, submission.parents[1])


def _check_options(options: Sequence[str]) -> list[str]:
    """The options in their long form, ``--name=value``, where that is known."""
    short = [(option, _SHORT.get(option[:2]) if option[2:] else None) for option in options]
    long = [f"--{name}={option[2:].removeprefix('=')}" if name else option for option, name in short]
    for option in long:
        if option.removeprefix("--").partition("=")[0] in _OURS or option in ("-a", "-W", "-H"):
            remedy = "take it out; --jobs=N lets N runs train at a time"
            raise UserError(f"{option} is an option that a sweep sets itself", remedy)
    return long


def _processes(options: Sequence[str]) -> int | None:
    """Of a run's job; None if it cannot be told here."""
    size = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", SCRIPT.read_text(), re.MULTILINE))
    size |= dict(option.removeprefix("--").partition("=")[::2] for option in options)
    numbers = [size.get(name, "1") for name in (["ntasks"] if "ntasks" in size else ["nodes", "ntasks-per-node"])]
    return math.prod(map(int, numbers)) if all(number.isdecimal() and int(number) for number in numbers) else None


def _write_submission(sweep: Sweep) -> Path:
    """The folder of a new submission; it appears when everything is in it."""
    (sweep.folder / LOGS).mkdir(parents=True, exist_ok=True)
    above = Path(os.path.abspath(sweep.folder)) / _SUBMITTED
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    hidden = above / f".{stamp}.{os.getpid()}"
    (hidden / _TASKS).mkdir(parents=True)
    replace_text(hidden / sweep.file.name, sweep.text)
    for run in sweep.runs:
        (hidden / _TASKS / str(run.number)).write_text("".join(f"{word}\n" for word in (run.config_file, *run.overrides)))
    names = (stamp, *(f"{stamp}_{count}" for count in range(2, 1000)))  # others of this second
    return hidden.rename(next(above / name for name in names if not (above / name).exists()))


def _folder_of(task: Path) -> Path:
    return Path(task.read_text().splitlines()[-1].partition("=")[2])


def _in_the_queue(sweep: Sweep) -> dict[str, str]:
    """Folders, absolute, of the runs that wait or run -> id of their job array."""
    asked = _run("squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%F|%K|%o")
    if asked.returncode != 0:
        raise UserError(f"squeue does not answer ({_last(asked.stderr)})", "try again when its controller is there")
    ours = f"{TASK} {Path(os.path.abspath(sweep.folder)) / _SUBMITTED}/"
    found = {}
    for line in asked.stdout.splitlines():
        array, number, command = line.split("|", 2)
        if ours in command:
            task = Path(command.partition(f"{TASK} ")[2].strip()) / _TASKS / number
            if task.is_file():
                found[os.path.abspath(_folder_of(task))] = array
    return found


def _sbatch(*words: str) -> str:
    """Submit a job; returns its id. What belongs to a job that this one may be in is left behind."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    done = _run("sbatch", "--parsable", *words, environment=kept)
    if done.returncode != 0:
        raise UserError(f"sbatch refused the job: {_last(done.stderr)}", "correct the options before the file")
    return done.stdout.strip().splitlines()[-1].partition(";")[0]


def _run(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1].removeprefix("sbatch: ").removeprefix("error: ").rstrip(".")
