"""The examples of examples/loader run: each trains on the digits with ImageLoader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from examples.loader import plain
from support.launching import REPOSITORY

SIZE = ("--image-size", "32", "--batch-size", "48")


def test_a_plain_loop_goes_on_where_it_stopped(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against an example that shows images twice, or none, when it is started again."""
    command = [str(digits_shards), "--state", str(tmp_path / "state.pt")]
    assert plain.main([*command, *SIZE, "--steps", "10"]) == (10 * 48, 0)
    assert plain.main([*command, *SIZE, "--epochs", "1"]) == (1438 - 480, 1)
    assert torch.load(tmp_path / "state.pt", weights_only=True)[2]["position"] == 0
    assert plain.main([*command, *SIZE, "--epochs", "1"]) == (0, 1)


def test_the_page_runs(digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against examples in docs/loader.md that do not run as they stand."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "digits").symlink_to(digits_shards)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (REPOSITORY / "docs" / "loader.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})
    state = torch.load("state.pt", weights_only=True)[2]
    assert (state["epoch"], state["position"], state["stream"]["seed"]) == (2, 0, 3)


def test_accelerate_goes_on_where_it_stopped(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a place in the epoch that accelerate does not save, or that its loop does not go on from."""
    pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    from examples.loader import with_accelerate

    command = [str(digits_shards), "--folder", str(tmp_path / "state"), *SIZE, "--epochs", "1"]
    assert with_accelerate.main([*command, "--steps", "10"]) == (480, 0)
    assert with_accelerate.main(command) == (1438 - 480, 1)
    assert with_accelerate.main(command) == (0, 1)


def test_lightning_goes_on_where_it_stopped(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a checkpoint of Lightning's without the loader's place."""
    pytest.importorskip("lightning", reason="needs lightning: pip install lightning")
    from examples.loader import with_lightning

    command = [str(digits_shards), "--folder", str(tmp_path / "checkpoints"), *SIZE]
    assert with_lightning.main([*command, "--steps", "10"]) == 480
    assert with_lightning.main([*command, "--epochs", "1"]) == 1438 - 480
    assert with_lightning.main([*command, "--epochs", "2"]) == 1438


def test_timm_trains(digits_shards: Path) -> None:
    """Guards against targets that timm's loss does not take, and against a loader that its script cannot use."""
    pytest.importorskip("timm", reason="needs the extra timm")
    from examples.loader import with_timm

    seen, loss = with_timm.main([str(digits_shards), *SIZE, "--model", "test_resnet", "--epochs", "1"])
    assert seen == 1438 and 0 < loss < 5
