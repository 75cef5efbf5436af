"""A thousand kills: runs of many kinds, each disturbed again and again and then judged by ``pervit audit``.

    PYTHONPATH=tests python -m faults.soak --folder build/soak --kills 1000

Every case is drawn from its number: a model, an optimizer, world sizes and ZeRO stages, and what happens to it. ``ledger.jsonl`` gets a line
for each case, so that the same command goes on where it stopped; ``--ledger FILE`` keeps it elsewhere. The exit code is 1 if a case
was judged to differ.

A power cut is one of the file system that holds the run (``power.py``; root only). Where moto and the extra ``remote`` are installed, some
runs are in a bucket, and some of those lose their local folder with a kill. Where timm is, one of its models is among the models. Some of
the other starts are by ``launch/local.sh`` and torchrun.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from faults.history import Start
from faults.killing import Ordeal
from faults.launched import LAUNCHERS, LaunchedJob
from faults.power import Disk
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import PREEMPTED
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.schedule import Schedule
from support.launching import REPOSITORY
from support.ranks import Job, run_forked
from support.runs import write_small_config
from support.stores import BUCKET, aws_environment, s3_server

STEPS, KILLS = 60, 20  # of a case: its end and its audit take as long as five kills
EVERY_EPOCHS = 0.05  # an evaluation: four or five steps
OPTIONS = (
    "log.samples=true",
    "log.every_steps=1",
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=3",
    f"eval.every_epochs={EVERY_EPOCHS}",
)
MODELS = {
    "pervit": ("model.switches={widths: [16, 16, 16, 16]}", "train.ema_decay=0.9"),
    "deit": ("model.name=deit_t",),
}
if find_spec("timm"):
    MODELS["timm"] = ("model.name=timm:test_vit",)
OPTIMIZERS = ("adamw", "lamb", "muon", "torch.optim:NAdam")
SIZES, STAGES = {16: (1, 2, 4), 12: (1, 3)}, (0, 1, 2, 3)  # world sizes by global batch
LAUNCHED = 0.2  # of the starts are by a launcher: five seconds more
MOMENTS = {"start": 0.15, "step": 0.3, "save": 0.35, "evaluation": 0.2}
DISTURBANCES = {"kill": 0.55, "power cut": 0.15, "terminate": 0.15, "stop and kill": 0.15}


@dataclass(kw_only=True)
class Case(Ordeal):
    """An ordeal of any model, on a disk of its own where that can be; ``store``: the port of an S3 server that the run is in."""

    schedule: Schedule
    launchers: Counter = field(default_factory=Counter)
    disk: Disk | None = None
    store: int | None = None

    def start(self, world_size: int, *overrides: str) -> Job:
        self.starts.append(Start(time.time(), latest_step(self.run) or 0, world_size))
        words = ("--config", self.config, *self.options, *overrides)
        if self.store is None:
            words = (*words, f"output_dir={self.run}")
            launcher = self.draw.choice(LAUNCHERS) if self.draw.random() < LAUNCHED else None
            self.launchers[launcher or "none"] += 1
            return LaunchedJob(launcher, world_size, *words) if launcher else Job(world_size, *words)
        place = {**aws_environment(self.store), "PERVIT_RUNS": str(self.run.parents[1])}
        return Job(world_size, *words, f"output_dir=s3://{BUCKET}/{self.run.name}", module="support.bucket_train", **place)

    def is_at(self, moment: str) -> bool:
        return self.is_evaluating() if moment == "evaluation" else super().is_at(moment)

    def is_evaluating(self) -> bool:
        """Whether the last step that rank 0 began is one with an evaluation, which has not ended."""
        begun, ended = (last_row(self.run / name) for name in ("samples/rank-00000.jsonl", "events.jsonl"))
        due = begun is not None and self.schedule.passes(begun["step"], EVERY_EPOCHS)
        return due and not (ended and ended["time"] > begun["time"] and ended["event"] in ("evaluation", "save"))


def last_row(path: Path) -> dict | None:
    """The last whole row of a log; None if there is none yet."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines[-2:] if line.endswith("\n")]
    return json.loads(whole[-1]) if whole else None


def disturb(ordeal: Case, size: int, stage: str) -> str | None:
    """Start the run and end it at a random moment; what was done, None if it was done before."""
    draw = ordeal.draw
    (kind,) = draw.choices(list(DISTURBANCES), list(DISTURBANCES.values()))
    (moment,) = draw.choices(list(MOMENTS), list(MOMENTS.values()))
    if kind == "kill" or kind == "power cut" and not ordeal.disk:
        if not ordeal.start_and_kill(size, moment, stage, most_steps=4):
            return None
        if ordeal.store is not None and draw.random() < 0.3:
            shutil.rmtree(ordeal.run)
            return "kill, and an empty disk"
        return f"kill at a{'n' * (moment == 'evaluation')} {moment}"
    job = ordeal.start(size, stage)
    if not ordeal.wait_for(job, moment if kind == "power cut" else "step", most_steps=4):
        return None
    rank = draw.randrange(size)
    if kind == "power cut":
        assert ordeal.disk
        ordeal.disk.cut_under(job)
    elif kind == "terminate":
        job.signal(signal.SIGTERM, rank)
        assert set(job.wait()) <= {PREEMPTED, 0}, job.outputs()
    else:  # a rank that is suspended, goes on, and is killed
        job.signal(signal.SIGSTOP, rank)
        time.sleep(draw.uniform(0.1, 2))
        job.signal(signal.SIGCONT, rank)
        time.sleep(draw.uniform(0, 0.5))
        job.kill(rank)
        job.wait_after_kill()
    return kind


def case(number: int, shards: Path, folder: Path, store: int | None) -> dict:
    """Run a case; its line of the ledger."""
    draw, began = random.Random(number), time.monotonic()
    model, optimizer = draw.choice(list(MODELS)), draw.choice(OPTIMIZERS)
    stages, batch = draw.choice([(0,), (1, 2), STAGES]), draw.choice(list(SIZES))
    store = store if draw.random() < 0.25 else None
    subprocess.run(["umount", "--quiet", folder / "disk"])  # of a soak that was killed
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = (*OPTIONS, *MODELS[model], f"optim.name={optimizer}", f"train.global_batch_size={batch}")
    try:
        disk = Disk(folder / "disk.ext4", folder / "disk")
    except OSError as error:
        disk = None
        print(f"no power cuts: {error}", file=sys.stderr)
    run = folder / "disk" / BUCKET / f"run-{number}"
    schedule = Schedule(len(ShardSet(shards, "train")), batch, epochs=10, max_steps=STEPS)
    ordeal = Case(write_small_config(shards, folder), run, options, draw, schedule=schedule, disk=disk, store=store)
    try:
        return judged(ordeal, folder, stages, SIZES[batch]) | {
            "case": number,
            "model": model,
            "optimizer": optimizer,
            "batch": batch,
            "bucket": store is not None,
            "seconds": round(time.monotonic() - began, 1),
        }
    finally:
        if disk:
            disk.close()


def judged(ordeal: Case, folder: Path, stages: tuple[int, ...], sizes: tuple[int, ...]) -> dict:
    """Disturb a run until it is done, and audit it."""
    draw, done = ordeal.draw, Counter[str]()

    def place() -> tuple[int, str]:
        return draw.choice(sizes), f"train.zero_stage={draw.choice(stages)}"

    try:
        while done.total() < KILLS and (what := disturb(ordeal, *place())):
            done[what] += 1
        ordeal.start(*place()).succeed()
        told = run_forked("pipeline.audit", ordeal.run, "--windows", 1, "--output", folder / "audit.html", check=False)
        agrees, said = told.returncode == 0, (told.stdout + told.stderr).splitlines()
    except AssertionError as error:  # an exit code, or a rank that does not end
        agrees, said = False, str(error).splitlines()
    if not agrees:
        shutil.copytree(
            folder, folder.with_name(f"{folder.name}-{ordeal.run.name}"), ignore=shutil.ignore_patterns("*.ext4", "lost+found")
        )
    return {
        "sizes": [start.world_size for start in ordeal.starts],
        "stages": stages,
        "launchers": ordeal.launchers,
        "done": done,
        "agrees": agrees,
        **({} if agrees else {"audit": said}),
    }


def table(rows: list[dict]) -> str:
    """The ledger as a table in Markdown, by model and optimizer."""
    lines = ["| model | optimizer | cases | kills | of these | differ |", "|---|---|---|---|---|---|"]
    for kind in sorted({(row["model"], row["optimizer"]) for row in rows}):
        own = [row for row in rows if (row["model"], row["optimizer"]) == kind]
        done = sum((Counter(row["done"]) for row in own), Counter[str]())
        words = ", ".join(f"{count} {what}" for what, count in sorted(done.items()))
        lines.append(
            f"| {kind[0]} | {kind[1]} | {len(own)} | {done.total()} | {words} | {sum(not row['agrees'] for row in own)} |"
        )
    starts = sum((Counter(row.get("launchers", {})) for row in rows), Counter[str]())
    return "\n".join(
        [*lines, "", "starts by launcher: " + ", ".join(f"{name} {count}" for name, count in sorted(starts.items()))]
    )


@contextmanager
def s3_server_where_installed() -> Iterator[int | None]:
    """The port of moto's server; None where it or the extra ``remote`` is missing."""
    if not all(map(find_spec, ("moto", "boto3", "obstore"))):
        yield None
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's requests
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as port:
        yield port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    parser.add_argument("--ledger", type=Path, help="default: FOLDER/ledger.jsonl")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first case: for several soaks at a time, each in a folder of its own",
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    shards, ledger = folder / "shards", args.ledger or folder / "ledger.jsonl"
    if not shards.exists():
        for words in (
            ("data_prep.make_demo_dataset", "--output", folder / "images"),
            ("data_prep.shard_imagenet", "--source", folder / "images", "--output", shards, "--samples-per-shard", 400),
        ):
            subprocess.run([sys.executable, "-m", *map(str, words)], check=True, cwd=REPOSITORY)
    rows = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    with s3_server_where_installed() as store:
        while sum(sum(row["done"].values()) for row in rows) < args.kills:
            known = {row["case"] for row in rows}
            number = next(number for number in count(args.first) if number not in known)
            rows.append(case(number, shards, folder / "case", store))
            with open(ledger, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(
                {key: value for key, value in rows[-1].items() if key != "audit"},
                *rows[-1].get("audit", ()),
                sep="\n  ",
                flush=True,
            )
    print(table(rows))
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
