"""Activation checkpointing really lowers the peak."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.launching import REPOSITORY, clean_environment

# A process of its own: the peak of the resident set never goes down again.
MEASURE = """
import sys, torch
from pipeline.models import create_model

def peak():  # MiB; getrusage's figure begins with what the parent process had when it started this one
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

torch.manual_seed(0)
torch.set_num_threads(1)
model = create_model("pervit_t", num_classes=10, image_size=112, activation_checkpointing=sys.argv[1] == "True")
images = torch.randn(16, 3, 112, 112)
model(images[:1]).sum().backward()
before = peak()
model(images).sum().backward()
print(peak() - before)
"""


def peak_growth_mib(checkpointing: bool) -> float:
    command = [sys.executable, "-c", MEASURE, str(checkpointing)]
    result = subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, check=True)
    return float(result.stdout)


@pytest.mark.long
def test_activation_checkpointing_lowers_the_peak(record_property) -> None:
    """Guards against a switch that does nothing (DeepSpeed #5704): a step of 16 images at 112 px."""
    plain, checkpointed = peak_growth_mib(False), peak_growth_mib(True)
    print(f"peak growth {plain:.0f} MiB without, {checkpointed:.0f} MiB with activation checkpointing")
    assert checkpointed < 0.7 * plain
