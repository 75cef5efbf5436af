"""Edit the records of a run, as somebody does who knows how, and ask the audit what it finds in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from safetensors import numpy as tensors

from pipeline.audit.records import Records
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, checksum
from pipeline.config import load_config
from pipeline.runs.files import RunFiles


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def records_of(run: Path) -> Records:
    return Records(RunFiles(run), load_config(run / "config.yaml"))


def found_in(run: Path) -> dict[str, list[str]]:
    """Problems by the kind of record."""
    return {finding.name: finding.problems for finding in records_of(run).findings() if finding.problems}


def edit_rows(run: Path, edit: Callable[[list[dict]], Any]) -> None:
    rows = lines(run / "metrics.jsonl")
    edit(rows)
    write_lines(run / "metrics.jsonl", rows)


def edit_starts(run: Path, edit: Callable[[list[dict]], Any]) -> None:
    path = run / "environment.json"
    starts = json.loads(path.read_text())
    edit(starts)
    path.write_text(json.dumps(starts))


def edit_state(run: Path, step: int, **values: Any) -> None:
    """Another state with a right checksum."""
    folder = step_folder(run, step)
    manifest = CheckpointManifest.read(folder)
    manifest = replace(manifest, state=replace(manifest.state, **values))
    (folder / "checkpoint.json").write_text(manifest.to_text())


def edit_samples(run: Path, rank: int, edit: Callable[[list[dict]], Any]) -> None:
    path = run / "samples" / f"rank-{rank:05d}.jsonl"
    rows = lines(path)
    edit(rows)
    write_lines(path, rows)


def edit_config(run: Path, section: str, key: str, value: Any) -> None:
    path = run / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config[section][key] = value
    path.write_text(yaml.safe_dump(config))


def without_tensors(run: Path, *prefixes: str) -> None:
    """Remove tensors from the last checkpoint, with right checksums; of the optimizer also what the manifest says of it."""
    folder = step_folder(run, 8)
    manifest, path = CheckpointManifest.read(folder), folder / "part-00000.safetensors"
    kept = {name: value for name, value in tensors.load_file(path).items() if not name.startswith(prefixes)}
    tensors.save_file(kept, path)
    manifest.files[0] = checksum(path)
    manifest = replace(manifest, optimizer_state=[]) if "optimizer." in prefixes else manifest
    (folder / "checkpoint.json").write_text(manifest.to_text())


def evaluation(rows: list[dict], step: int, weights: str = "model") -> dict:
    return next(row for row in rows if row["step"] == step and row.get("weights") == weights)
