"""Runs that grow and are rewound, for ``pipeline.track``; and rows of ``metrics.jsonl`` from what a tracker has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.logs.run_log import drop_rows_after
from support.launching import REPOSITORY, clean_environment

BEGUN = 1_800_000_000.0
_PLAIN = ("epoch", "samples")


class GrowingRun:
    """A run folder as a training writes it, step by step.

    Args:
        folder: created by :meth:`start`.
        last_step: of the schedule.
    """

    def __init__(self, folder: Path, last_step: int = 60) -> None:
        self.folder, self.last_step, self.step, self.starts = folder, last_step, 0, 0
        self.metrics = folder / "metrics.jsonl"

    def start(self, step: int = 0) -> None:
        """Begin, or resume from a checkpoint of this step."""
        from pipeline.logs.tensorboard import EventFile

        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / ".lock").write_text('{"pid": 1, "host": "node7"}')
        config = f"output_dir: {self.folder}\nmodel: {{name: pervit_t, image_size: 224, switches: {{}}}}\noptim: {{betas: [0.9, 0.999]}}\n"
        (self.folder / "config.yaml").write_text(config + f"data: {{num_threads: {4 + self.starts}}}\n")
        self.starts += 1
        starts = [{"started": "2027-01-15", "number": n, "world_size": 8, "hosts": ["node7"]} for n in range(self.starts)]
        (self.folder / "environment.json").write_text(json.dumps(starts))
        self.event("start", step, number=self.starts, last_step=self.last_step, reached=self.step or None)
        self.step = step
        drop_rows_after(self.metrics, step)
        self.metrics.touch()
        self._pictures = EventFile(self.folder / "tensorboard", purge_step=step + 1)
        self._pictures.flush()

    def train(self, until: int) -> None:
        """Take steps; every tenth is evaluated, and has a picture."""
        with open(self.metrics, "a") as file:
            for step in range(self.step + 1, until + 1):
                # 0.001 s apart from start to start, so that repeated rows differ from those they replace
                where = {
                    "step": step,
                    "time": round(BEGUN + 10 * step + self.starts / 1000, 3),
                    "epoch": step / 50,
                    "samples": 64 * step,
                }
                loss = None if step == 7 else 3 / step + self.starts / 7
                more = {
                    "images_per_second": 1234.5,
                    "mfu": 0.41,
                    "data_wait": 1e-9,
                    "replaced": 0,
                    "bad_samples": 2,
                    "skipped_steps": 0,
                }
                file.write(json.dumps({**where, "loss": loss, "lr": 1e-4 / step, "grad_norm": 0.1 + 0.2, **more}) + "\n")
                if step % 10 == 0:
                    self._evaluate(where, file)
                    self._pictures.flush()
        self.step = until

    def _evaluate(self, where: dict[str, Any], file: Any) -> None:
        import torch

        for weights, top1 in (("model", where["step"] / 3), ("ema", where["step"] / 2)):
            result = {"top1": top1, "top5": 99.0, "loss": 1.0, "correct1": 61, "correct5": 99, "count": 100}
            file.write(json.dumps({**where, "time": where["time"] + 1, "weights": weights, **result}) + "\n")
        measures = {"gates": [[0.5, None], [0.25, 1.0]], "distance": {"mean": 3.5}}
        file.write(json.dumps({**where, "time": where["time"] + 2, "analysis": measures}) + "\n")
        noise = torch.randint(256, (3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(self.starts))
        self._pictures.image("train/images", noise, where["step"])
        self.event("evaluation", where["step"], seconds=1.5)

    def event(self, event: str, step: int, **facts: Any) -> None:
        with open(self.folder / "events.jsonl", "a") as file:
            file.write(json.dumps({"event": event, "time": BEGUN + 10 * step, "step": step, **facts}) + "\n")

    def end(self) -> None:
        """Reach the end of the schedule."""
        self.train(self.last_step)
        self.event("end", self.step, reason="the end of the schedule", whole=True)
        (self.folder / ".lock").write_text("")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """``metrics.jsonl`` as a tracker can have it: without ``null``, analyses flat; in the order of :func:`rows_back`."""
        return _ordered(_plain(json.loads(line)) for line in self.metrics.read_text().splitlines())

    @property
    def events(self) -> int:
        return len((self.folder / "events.jsonl").read_text().splitlines())


def client_environment(folder: Path, **variables: str) -> dict[str, str]:
    """For trackers' clients: everything that they write lies in this folder."""
    return clean_environment(
        PYTHONPATH=str(REPOSITORY),
        HOME=str(folder),
        XDG_STATE_HOME=str(folder / "state"),
        WANDB_DIR=str(folder),
        MLFLOW_DISABLE_TELEMETRY="true",
        TRACKIO_DIR=str(folder / "trackio"),
        **variables,
    )


def rows_back(points: Iterable[tuple[int, float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl`` from points: step, time in seconds, name -> value. Events and pictures are left out."""
    rows = []
    for step, time, values in points:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            group, _, key = name.partition("/")
            if group in ("train", "utilization", "trouble") and name != "train/images":
                groups.setdefault("train", {})[key] = value
            elif group == "eval" or key.startswith("eval_"):
                key = key.removeprefix("eval_")
                weights = "ema" if key.endswith("_ema") else "model"
                groups.setdefault(weights, {"weights": weights})[key.removesuffix("_ema")] = value
            elif group == "analysis":
                groups.setdefault("analysis", {})[name] = value
        where = {"step": step, "time": round(time, 3)} | {
            name: values[f"where/{name}"] for name in _PLAIN if f"where/{name}" in values
        }
        rows += [{**where, **found} for found in groups.values()]
    return _ordered(rows)


def _ordered(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["step"], row["time"], str(row.get("weights"))))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    analysis = row.pop("analysis", None)
    if analysis:
        row |= {f"analysis/gates/{i}/{j}": value for i, layer in enumerate(analysis["gates"]) for j, value in enumerate(layer)}
        row["analysis/distance/mean"] = analysis["distance"]["mean"]
    return {name: value for name, value in row.items() if value is not None}
