"""A thousand kills: runs of many kinds, each disturbed again and again and then judged by ``pervit audit``.

    PYTHONPATH=tests python -m faults.soak --folder build/soak --kills 1000

Every case is drawn from its number: a model, an optimizer, world sizes and ZeRO stages, and what happens to it. ``ledger.jsonl`` gets a line
for each case, so that the same command goes on where it stopped. The exit code is 1 if a case was judged to differ.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from faults.history import Start
from faults.killing import Ordeal, random_moment
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import PREEMPTED
from support.launching import REPOSITORY
from support.ranks import Job, run_forked, wait_for_steps
from support.runs import write_small_config

STEPS, KILLS = 60, 10  # of a case
OPTIONS = (
    "log.samples=true",
    "log.every_steps=1",
    f"train.max_steps={STEPS}",
    "checkpoint.every_steps=4",
    "checkpoint.keep_last=3",
    "eval.every_epochs=0.25",
)
MODELS = {
    "pervit": ("model.switches={widths: [16, 16, 16, 16]}", "train.ema_decay=0.9"),
    "deit": ("model.name=deit_t",),
}
OPTIMIZERS = ("adamw", "lamb", "muon", "torch.optim:NAdam")
SIZES, STAGES = (1, 2, 4), (0, 1, 2, 3)
DISTURBANCES = {"kill": 0.7, "terminate": 0.15, "stop and kill": 0.15}


class Case(Ordeal):
    """An ordeal of any model."""

    def start(self, world_size: int, *overrides: str) -> Job:
        self.starts.append(Start(time.time(), latest_step(self.run) or 0, world_size))
        return Job(world_size, "--config", self.config, f"output_dir={self.run}", *self.options, *overrides)


def disturb(ordeal: Ordeal, size: int, stage: str) -> str | None:
    """Start the run and end it at a random moment; what was done, None if it was done before."""
    draw = ordeal.draw
    (kind,) = draw.choices(list(DISTURBANCES), list(DISTURBANCES.values()))
    moment = random_moment(draw)
    if kind == "kill":
        return f"kill at a {moment}" if ordeal.start_and_kill(size, moment, stage, most_steps=4) else None
    job = ordeal.start(size, stage)
    wait_for_steps(job, ordeal.run, draw.randint(1, 4))
    if not job.runs:
        assert job.codes == [0] * size, job.outputs()
        return None
    if kind == "terminate":
        job.signal(signal.SIGTERM, draw.randrange(size))
        assert set(job.wait()) <= {PREEMPTED, 0}, job.outputs()
    else:  # a rank that is suspended, goes on, and is killed
        rank = draw.randrange(size)
        job.signal(signal.SIGSTOP, rank)
        time.sleep(draw.uniform(0.1, 2))
        job.signal(signal.SIGCONT, rank)
        time.sleep(draw.uniform(0, 0.5))
        job.kill(rank)
        job.wait_after_kill()
    return kind


def case(number: int, shards: Path, folder: Path) -> dict:
    """Run a case; its line of the ledger."""
    draw, began = random.Random(number), time.monotonic()
    model, optimizer = draw.choice(list(MODELS)), draw.choice(OPTIMIZERS)
    stages = draw.choice([(0,), (1, 2), STAGES])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = (*OPTIONS, *MODELS[model], f"optim.name={optimizer}")
    ordeal, done = Case(write_small_config(shards, folder), folder / "run", options, draw), Counter[str]()

    def place() -> tuple[int, str]:
        return draw.choice(SIZES), f"train.zero_stage={draw.choice(stages)}"

    try:
        while done.total() < KILLS and (what := disturb(ordeal, *place())):
            done[what] += 1
        ordeal.start(*place()).succeed()
        told = run_forked("pipeline.audit", ordeal.run, "--windows", 1, "--output", folder / "audit.html", check=False)
        agrees, said = told.returncode == 0, (told.stdout + told.stderr).splitlines()
    except AssertionError as error:  # an exit code, or a rank that does not end
        agrees, said = False, str(error).splitlines()
    return {
        "case": number,
        "model": model,
        "optimizer": optimizer,
        "sizes": [start.world_size for start in ordeal.starts],
        "stages": stages,
        "done": done,
        "agrees": agrees,
        "audit": said[-2:] if agrees else said,
        "seconds": round(time.monotonic() - began, 1),
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
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/soak"))
    parser.add_argument("--kills", type=int, default=1000)
    args = parser.parse_args()
    folder = args.folder.resolve()
    shards, ledger = folder / "shards", folder / "ledger.jsonl"
    if not shards.exists():
        for words in (
            ("data_prep.make_demo_dataset", "--output", folder / "images"),
            ("data_prep.shard_imagenet", "--source", folder / "images", "--output", shards, "--samples-per-shard", 400),
        ):
            subprocess.run([sys.executable, "-m", *map(str, words)], check=True, cwd=REPOSITORY)
    rows = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    while sum(sum(row["done"].values()) for row in rows) < args.kills:
        rows.append(case(len(rows), shards, folder / "case"))
        with open(ledger, "a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        if not rows[-1]["agrees"]:
            shutil.copytree(folder / "case", folder / f"case-{rows[-1]['case']}")
        print({key: value for key, value in rows[-1].items() if key != "audit"}, *rows[-1]["audit"], sep="\n  ", flush=True)
    print(table(rows))
    return 0 if all(row["agrees"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
