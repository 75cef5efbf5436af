"""The sharding command and what it has written."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.files import file_sha256

SHARDER = "data_prep/shard_imagenet.py"


def digests(folder: Path) -> dict[str, str]:
    return {file.name: file_sha256(file) for file in sorted(folder.iterdir())}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
