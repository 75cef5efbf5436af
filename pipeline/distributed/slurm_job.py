"""Which Slurm job this process belongs to; needs no PyTorch, since the job script asks too."""

from __future__ import annotations

from collections.abc import Mapping


def job_name(environment: Mapping[str, str]) -> str | None:
    """The name under which ``scontrol`` knows this job alone: one task of a job array has the array's number as its own.

    Returns:
        Slurm's number, ARRAY_TASK in a job array; None outside of a job.
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return environment.get("SLURM_JOB_ID")
