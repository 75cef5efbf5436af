"""Define config keys with type, bounds, default and description: the run itself, and the whole config; say which a resumed run may change.

Model, training and optimizer are in ``train_sections``, data and augmentation in ``data_sections``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, field_validator
from pydantic.fields import FieldInfo

from pipeline.config.data_sections import AugmentConfig, DataConfig
from pipeline.config.train_sections import AUTO, ModelConfig, OptimConfig, TrainConfig
from pipeline.config.values import MAX_PROFILED, MAX_SECONDS, BatchSize, Epochs, Seconds, Section, Steps, Text, Window
from pipeline.stores.place import kept_in, parse_place

# Keys that a resumed run may change freely: they affect neither the order of samples nor the weights beyond rounding. The
# micro-batch size is one of them so that a run can move to other hardware: all random draws, Mixup's groups too, depend on an
# image's position in the global batch. Only BatchNorm, in models that have it, normalizes over a micro-batch.
_FREE_SECTIONS = ("eval.", "checkpoint.", "log.", "distributed.")
_FREE_KEYS = (
    "output_dir",
    "data.path",
    "data.mix",  # as data.path: the sets themselves, and their weights, are compared by their identity
    "data.cache",
    "data.cache_gib",
    "data.decode",
    "data.num_threads",
    "data.prefetch",
    "data.read_ahead",
    "data.max_bad_samples",
    "train.activation_checkpointing",
    "train.deterministic",
    "train.compile",
    "train.max_skipped_steps",
    "train.max_steps",
    "train.micro_batch_size",
    "train.zero_stage",
)


class EvalConfig(Section):
    every_epochs: Epochs | None = 1
    """Epochs between evaluations; there is always one at the end, and null means only that one."""
    batch_size: BatchSize = 128
    """Images per forward pass and rank. Does not affect accuracy, and the loss only by rounding."""
    analyses: bool | Steps = False
    """With each evaluation, also write how far attention heads look, ConViT's gates and the nonlocality of Φp, from so many of the first validation images (ConViT's Fig. 5: 1024); true: 256."""

    @field_validator("analyses", mode="before")
    @classmethod
    def _a_switch_or_a_number(cls, value: Any) -> Any:
        if not isinstance(value, int) or value < 0:
            raise ValueError("must be true, false or a number of images")
        return value


class CheckpointConfig(Section):
    every_steps: Steps | None = 1000
    """Steps between checkpoints; there is always one at the end, and null means only that one."""
    keep_last: Steps = 2
    """Number of most recent checkpoints to keep."""
    keep_best: bool = True
    """Also save after each evaluation with the best top-1 so far, and keep that checkpoint."""
    keep_every_steps: Steps | None = None
    """Also keep every checkpoint whose step is a multiple of this; null: none."""
    retry_seconds: Seconds = 300
    """How long a failed save (disk full, temporarily read-only) is retried while training continues; then the run stops."""
    accept: list[Text] = []
    """Keys that may differ, on resuming, from the config that the run was started with; `data` allows another data set."""


class LogConfig(Section):
    every_steps: Steps = 10
    """Steps between flushes of the log. Every step is logged; values are fetched from the device this often."""
    samples: bool = False
    """Log every sample that each rank trains on, with a digest of its augmentation (samples/ in output_dir)."""
    profile_steps: Annotated[Window | None, Field(examples=[(200, 210)])] = None
    """First and last of the steps that PyTorch's profiler records, such as [200, 210]: a trace and a memory timeline of each rank (profile/ in output_dir); null: none."""

    def misfits(self) -> Iterator[str]:
        first, last = self.profile_steps or (1, 1)
        if not first <= last < first + MAX_PROFILED:
            yield f"log.profile_steps must go from a step to a later one, at most {MAX_PROFILED} steps in all, got {[first, last]}"


class DistributedConfig(Section):
    """When the other ranks declare a rank lost."""

    silence_timeout: Annotated[float, Field(ge=5, le=100, allow_inf_nan=False)] = 60
    """Seconds without a heartbeat after which the other ranks declare a rank lost and exit; the job scripts wait 120 seconds for that."""
    progress_timeout: Annotated[float, Field(ge=5, le=MAX_SECONDS, allow_inf_nan=False)] = 1800
    """Seconds that a live rank may spend on one unit of progress (a step, an evaluation batch, a save); a sixth of it on one read of a file."""

    @property
    def collective_timeout(self) -> float:
        """Seconds that a collective may wait for a rank. The heartbeat needs up to progress_timeout + 10 s to name one that hangs, and a
        collective that timed out first would be reported in its place; the rest is for a slow store and ranks that start late."""
        return self.progress_timeout + 120.0


class Config(Section):
    output_dir: Text = "runs/default"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard events, the resolved config. `s3://BUCKET/PREFIX` (gs://, az://): kept in `$PERVIT_RUNS/BUCKET/PREFIX` (default runs/) and copied there."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Determines initial weights, sample order and augmentation."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    distributed: DistributedConfig = DistributedConfig()

    @property
    def folder(self) -> Path:
        """Where this machine keeps the run: ``output_dir``, or the folder of one in a store."""
        return kept_in(parse_place(self.output_dir))

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """A copy with other values, which are not validated: dotted key -> value."""
        config = self
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            update = {section: getattr(config, section).model_copy(update={name: value})} if section else {name: value}
            config = config.model_copy(update=update)
        return config

    def compilation(self, world_size: int, stage: int | str, on_gpu: bool) -> str:
        """``train.compile`` with "auto" settled, at a ZeRO stage. A step as a graph has only run on one GPU; there the CPU takes longer to
        start the kernels of a small model than the GPU to run them (docs/results/gpu_step.md)."""
        train = self.train
        if train.compile != AUTO:
            return train.compile
        if not on_gpu or (world_size > 1 and stage == 3):  # ZeRO-3's hooks on every submodule cannot be compiled
            return "off"
        hindered = train.activation_checkpointing or train.deterministic or train.teacher or self.data.size_schedule
        one_pass = world_size == 1 and train.micro_batch_size == train.global_batch_size
        return "graphs" if one_pass and not hindered else "blocks"

    def misfits(self) -> Iterator[str]:
        train, side, classes, group = self.train, self.model.image_size, self.model.num_classes, self.augment.unit
        if self.data.train_crop == "simple" and side < 5:
            yield f"model.image_size must be at least 5 with data.train_crop=simple, which mirrors 4 pixels at each border, got {side}"
        if (largest := max((size for _, size in self.data.size_schedule), default=0)) > side:
            yield f"data.size_schedule must have sides of at most model.image_size {side}, got {largest}: raise model.image_size"
        if largest and train.compile == "graphs":
            yield "data.size_schedule requires another train.compile than graphs, whose images have one size: set train.compile=model"
        if train.loss == "bce" and train.bce_threshold is not None:
            # Targets of a class that an image shows, and of one that it does not.
            absent, present = train.label_smoothing / classes, 1 - train.label_smoothing + train.label_smoothing / classes
            if absent > train.bce_threshold:
                yield (
                    f"train.loss=bce requires targets of at most train.bce_threshold {train.bce_threshold:g} for classes that are not "
                    f"shown, got {absent:.2g} for {classes} classes with train.label_smoothing {train.label_smoothing:g}: set "
                    f"train.label_smoothing=0, or a higher threshold"
                )
            if present <= train.bce_threshold:
                yield (
                    f"train.loss=bce requires a train.bce_threshold below the target of a class that is shown, {present:.3g} with "
                    f"train.label_smoothing {train.label_smoothing:g}, got {train.bce_threshold:g}: set a lower threshold"
                )
        if isinstance(micro := train.micro_batch_size, int) and micro % group:
            yield (
                f"augment.mix_group must divide train.micro_batch_size {micro}, got {group} ({micro} / {group} = {micro / group:.4g} groups): "
                f"set train.micro_batch_size to a multiple of {group}"
            )


def config_to_yaml(config: Section) -> str:
    """The resolved config, every key written out; :func:`load_config` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def flatten(config: Section) -> dict[str, Any]:
    """Dotted key -> value, in the order of the sections."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat.update({f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def is_free(key: str) -> bool:
    """Whether a resumed run may change a key, given as in :func:`flatten`."""
    return key in _FREE_KEYS or key.startswith(_FREE_SECTIONS)


def decides_weights(key: str) -> bool:
    """Whether a key, given as in :func:`flatten`, decides what a whole run trains; a resumed run may go on for more steps."""
    return key == "train.max_steps" or not is_free(key)


def section_fields(name: str, root: type[Section] = Config) -> dict[str, FieldInfo]:
    """The keys of a section of ``root``, of its top level for an empty name; none for what is not a section."""
    if not name:
        return root.model_fields
    annotation = root.model_fields[name].annotation if name in root.model_fields else None
    return annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, Section) else {}
