"""The examples of examples/loader run: each trains on the digits with ImageLoader."""

from __future__ import annotations

from pathlib import Path

import torch

from examples.loader import plain

SIZE = ("--image-size", "32", "--batch-size", "48")


def test_a_plain_loop_goes_on_where_it_stopped(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against an example that shows images twice, or none, when it is started again."""
    command = [str(digits_shards), "--state", str(tmp_path / "state.pt")]
    assert plain.main([*command, *SIZE, "--steps", "10"]) == (10 * 48, 0)
    assert plain.main([*command, *SIZE, "--epochs", "1"]) == (1438 - 480, 1)
    assert torch.load(tmp_path / "state.pt", weights_only=True)[2]["position"] == 0
    assert plain.main([*command, *SIZE, "--epochs", "1"]) == (0, 1)
