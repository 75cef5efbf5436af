"""Export a trained model for other programs, with a model card and a checksum.

    python -m pipeline.export runs/pervit_t --format onnx --output pervit_t.onnx
    python -m pipeline.export pervit_t.safetensors --format torch-export --output pervit_t.pt2

If the run kept an average of its weights (train.ema_decay), the average is exported unless --weights says otherwise.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.checkpoint.folder import parse_step
from pipeline.command_line import command_parser, run_command
from pipeline.exporting import FORMATS


def main() -> None:
    parser = command_parser("pipeline.export", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a run folder, one of its checkpoints, or an exported file")
    add("--format", required=True, metavar="FORMAT", help="; ".join(f"{each.name}: {each.what}" for each in FORMATS.values()))
    add("--output", required=True, type=Path, metavar="PATH", help="the file or folder to write")
    add("--step", type=parse_step, help="which checkpoint: a number or best (default: the newest)")
    add("--weights", choices=("model", "ema"), help="default: ema if the run kept an average, else model")
    add("--precision", choices=("fp32", "fp16"), help="of the export's weights (default: fp32)")
    add("--force", action="store_true", help="replace an existing export")
    run(parser.parse_args())


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UserError: there is no such model or format, or the output cannot be written.
    """
    raise NotImplementedError


def command() -> None:
    """``python -m pipeline.export``."""
    run_command(main, resumes=False)


if __name__ == "__main__":
    command()
