"""Read a run folder: the names of its files, what they hold, and how the run stands. Nothing here writes, and a run may go on meanwhile."""

from pipeline.checkpoint.folder import FOLDER as CHECKPOINTS
from pipeline.checkpoint.folder import LOCK

CONFIG = "config.yaml"  # the resolved config
ENVIRONMENT = "environment.json"  # versions, git commit, hosts, Slurm job; an entry per start
METRICS = "metrics.jsonl"  # a row per step, evaluation and analysis; ``time`` is Unix time in seconds
EVENTS = "events.jsonl"  # starts, evaluations, saves, ends
RESTARTS = "restarts.json"  # restarts of its job, by job scripts and sweeps
TENSORBOARD = "tensorboard"  # a folder: the metrics as scalars, and images
SAMPLES = "samples"  # a folder: every sample that each rank trained on
