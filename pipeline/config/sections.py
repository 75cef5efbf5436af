"""Every config key with its type, bounds, default and description; those of data and augmentation: ``data_sections``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.bounds import (
    MAX_EPOCHS,
    MAX_PROFILED,
    MAX_SECONDS,
    MAX_SIDE,
    MAX_SWITCH,
    BatchSize,
    Count,
    Epochs,
    Fraction,
    GlobalBatchSize,
    PositiveInt,
    PositiveRate,
    Rate,
    Seconds,
    Section,
    Share,
    Steps,
    Text,
    Window,
)
from pipeline.config.data_sections import AugmentConfig, DataConfig
from pipeline.errors import UserError

BUILT_IN_OPTIMIZERS = ("adamw", "lamb", "muon")  # optim.name; others are module:Class
AUTO = "auto"  # train.micro_batch_size: as many images as fit into memory
_TEACHER_LIBRARIES = ("torchvision:", "timm:")  # what train.teacher begins with if it is no run


class ModelConfig(Section):
    name: Annotated[Text, Field(max_length=100)] = "pervit_t"
    """Model name; `python -m pipeline.models` lists them. `timm:NAME`: a classifier of timm."""
    image_size: Annotated[int, Field(ge=1, le=MAX_SIDE)] = 224
    """Side of the square input, in pixels."""
    num_classes: PositiveInt = 1000
    """Number of classes; must match the shards."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate of the last block."""
    switches: dict[str, Any] = {}
    """Ablation switches of the model family, or arguments of timm's model; `python -m pipeline.models NAME` lists them."""

    @field_validator("switches")
    @classmethod
    def _plain_values(cls, switches: dict[str, Any]) -> dict[str, Any]:
        return _checked_plain(switches)


def _checked_plain(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        parts = value if isinstance(value, list | tuple) else [value]
        if not all(_is_plain(part) for part in parts):
            raise ValueError(f"must have a boolean, a number, text, null or a list of these as {name!a:.80}, got {value!a:.80}")
    return values


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= MAX_SWITCH)


class TrainConfig(Section):
    init_from: Text | None = None
    """Fine-tuning: initialize from a run folder or a file with a state dict (this project's or the authors'); null: random initialization."""
    teacher: Text | None = None
    """Hard distillation (DeiT, Eq. 3): folder of a finished run whose predictions are a second label, or `torchvision:NAME` or `timm:NAME` with teacher_weights; null: none."""
    teacher_weights: Text | None = None
    """Weight file of a teacher of torchvision or timm, which is never downloaded; null: the teacher is a run."""
    epochs: Epochs = 300
    """Length of the schedule, in passes over the training set; optim.cooldown_epochs come on top."""
    scale_epochs: bool = False
    """Divide epochs by the fraction that `--subset` kept, so that the number of steps is that of the full set."""
    max_steps: Steps | None = None
    """Stop after this many optimizer steps in total; the schedule stays the same. null: run to the end."""
    global_batch_size: GlobalBatchSize = 1024
    """Images per optimizer step over all ranks; independent of the world size."""
    micro_batch_size: BatchSize | Literal["auto"] = 128
    """Images per forward pass and rank; the number of gradient accumulation steps follows from it. auto: the largest that fits into memory, settled at the first start of the run."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: autocast with fp32 master weights. fp32: single precision throughout. auto: bf16 if every device has instructions for it, else fp32; a resumed run keeps its precision."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage: 0 none, 1 optimizer state, 2 + gradients, 3 + parameters sharded over the ranks. One process runs 0."""
    deterministic: bool = False
    """Only algorithms that add in a fixed order, so that a run repeats bit for bit on GPUs too, and is somewhat slower."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a quarter more time."""
    compile: Literal["auto", "off", "blocks", "model", "graphs"] = "auto"
    """torch.compile. blocks: each block, Φp and the loss. model: the forward pass as a whole. graphs: model, as CUDA graphs. auto: blocks on a GPU with zero_stage 0 to 2, else off."""
    loss: Literal["cross_entropy", "bce"] = "cross_entropy"
    """bce: binary cross entropy, each class by itself, mean over images and classes (DeiT III). Evaluation reports the cross entropy."""
    bce_threshold: Fraction | None = 0.0
    """loss bce: targets above this become 1 and the others 0, so that with 0 both labels of a mixed image count fully; null: the shares of mixture and smoothing."""
    label_smoothing: Fraction = 0.1
    """Fraction of the target probability spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights and of BatchNorm's statistics, which is evaluated too; null: none."""
    max_skipped_steps: Count = 0
    """Steps with non-finite gradients to skip; one more stops the run and saves what reproduces it."""

    @property
    def micro_batch(self) -> int:
        """``micro_batch_size`` as a number.

        Raises:
            UserError: it is "auto", which the start of a training settles.
        """
        if isinstance(self.micro_batch_size, str):
            raise UserError("train.micro_batch_size must be a number here, got auto, which only a training settles", "set one")
        return self.micro_batch_size

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _a_number_or_auto(cls, size: Any) -> Any:
        if isinstance(size, str) and size != AUTO and not size.strip().isdigit():
            raise ValueError("must be a whole number or auto")
        return size

    @model_validator(mode="after")
    def _a_librarys_teacher_has_weights(self) -> TrainConfig:
        library = (self.teacher or "").startswith(_TEACHER_LIBRARIES)
        if library and not self.teacher_weights:
            raise ValueError(
                f"train.teacher={self.teacher} requires train.teacher_weights, got null: name a local file, because nothing is downloaded"
            )
        if self.teacher_weights and not library:
            names = " or ".join(f"{library}NAME" for library in _TEACHER_LIBRARIES)
            raise ValueError(
                f"train.teacher_weights {self.teacher_weights} requires train.teacher {names}, got {self.teacher or 'null'}"
            )
        return self

    @model_validator(mode="after")
    def _a_teacher_needs_cross_entropy(self) -> TrainConfig:
        if self.loss == "bce" and self.teacher:
            raise ValueError(
                f"train.loss must be cross_entropy with train.teacher={self.teacher}, got bce, for which hard distillation (DeiT, Eq. 3) "
                "is not defined: set train.loss=cross_entropy, or train.teacher=null"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _off_is_a_word(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("compile") is False:  # what YAML 1.1 reads `off` as
            return {**values, "compile": "off"}
        return values


class OptimConfig(Section):
    """AdamW (Loshchilov & Hutter, 2019), LAMB, Muon or any other; norms, biases and other 1-D parameters are not decayed."""

    name: Annotated[Text, Field(max_length=200)] = "adamw"
    """The optimizer. adamw. lamb: of large batches and DeiT III, with clip_grad_norm 1.0 as timm's and apex's. muon: for the matrices of the blocks, AdamW for all else. `module:Class`: any class of `torch.optim.Optimizer`, such as `torch.optim:NAdam`, or one in a file in the current folder or on PYTHONPATH."""
    options: dict[str, Any] = {}
    """With `module:Class`: arguments of its constructor beside lr, such as `{betas: [0.9, 0.99]}`. It keeps its own defaults for the others: betas, momentum and eps below are those of the built-in optimizers. weight_decay works as the class defines it."""
    lr: PositiveRate = 5e-4
    """Peak learning rate at a global batch size of lr_batch_size; scaled linearly to global_batch_size."""
    lr_batch_size: GlobalBatchSize = 512
    """Global batch size that lr refers to."""
    min_lr: Rate = 1e-5
    """Final learning rate of the cosine schedule."""
    warmup_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 5
    """Linear warm-up, updated every step."""
    warmup_prefix: bool = False
    """Whether the cosine begins after the warm-up. false: it counts from the first step, as by default in timm, and the warm-up replaces its beginning."""
    cooldown_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0
    """Epochs at min_lr after the cosine, beyond train.epochs."""
    warmup_lr: Rate = 1e-6
    """Learning rate of the first step."""
    weight_decay: Rate = 0.05
    """Weight decay, decoupled in the built-in optimizers."""
    layer_decay: Share | None = None
    """Layer-wise decay of the learning rate, for fine-tuning: each layer below the classifier learns at this fraction of the one above it, such as 0.75; null: all at the same rate."""
    decay_embeddings: bool = False
    """Also decay class tokens and absolute position embeddings, as ConViT's published runs do."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's and LAMB's moment estimates."""
    momentum: Fraction = 0.95
    """Decay rate of Muon's momentum."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """AdamW's and LAMB's epsilon, added to the denominator."""
    clip_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Maximum global gradient norm; null: no clipping."""

    @field_validator("name")
    @classmethod
    def _built_in_or_a_class(cls, name: str) -> str:
        if name not in BUILT_IN_OPTIMIZERS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name):
            built_in = ", ".join(f"'{known}'" for known in BUILT_IN_OPTIMIZERS)
            raise ValueError(f"must be {built_in} or a class as 'module:Class'")
        return name

    @field_validator("options")
    @classmethod
    def _plain_values(cls, options: dict[str, Any]) -> dict[str, Any]:
        return _checked_plain(options)

    @model_validator(mode="after")
    def _options_are_of_a_class(self) -> OptimConfig:
        if self.name in BUILT_IN_OPTIMIZERS:
            if self.options:
                raise ValueError(f"optim.options requires optim.name=module:Class, got {self.name}: remove optim.options")
            return self
        for key in ("betas", "momentum", "eps"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"optim.{key} must be left at its default with optim.name={self.name}, got {getattr(self, key)}: set optim.options={{{key}: ...}} instead"
                )
        for key in ("lr", "weight_decay", "params"):
            if key in self.options:
                raise ValueError(f"optim.options must not have {key}, which the run sets: set optim.{key} instead")
        return self


class EvalConfig(Section):
    every_epochs: Epochs | None = 1
    """Epochs between evaluations; there is always one at the end, and null means only that one."""
    batch_size: BatchSize = 128
    """Images per forward pass and rank. Does not affect accuracy, and the loss only by rounding."""
    analyses: bool = False
    """With each evaluation, also write how far attention heads look, ConViT's gates and the nonlocality of Φp, from the first 256 validation images."""


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

    @field_validator("profile_steps")
    @classmethod
    def _a_window_of_steps(cls, window: tuple[int, int] | None) -> tuple[int, int] | None:
        if window and not window[0] <= window[1] < window[0] + MAX_PROFILED:
            raise ValueError(f"must go from a step to a later one, at most {MAX_PROFILED} steps in all, got {list(window)}")
        return window


# Added to progress_timeout for collectives. The heartbeat needs up to progress_timeout + 10 s to name a rank that hangs; a
# collective that timed out first would be reported in its place. The rest is slack for a slow store and ranks that start late.
_HEARTBEAT_MARGIN = 120.0


class DistributedConfig(Section):
    """When the other ranks declare a rank lost."""

    silence_timeout: Annotated[float, Field(ge=5, le=100, allow_inf_nan=False)] = 60
    """Seconds without a heartbeat after which the other ranks declare a rank lost and exit; the job scripts wait 120 seconds for that."""
    progress_timeout: Annotated[float, Field(ge=5, le=MAX_SECONDS, allow_inf_nan=False)] = 1800
    """Seconds that a live rank may spend on one unit of progress (a step, an evaluation batch, a save)."""

    @property
    def collective_timeout(self) -> float:
        """Seconds that a collective may wait for a rank: longer than the heartbeat needs to name the one that hangs."""
        return self.progress_timeout + _HEARTBEAT_MARGIN


class Config(Section):
    output_dir: Text = "runs/default"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard events, the resolved config."""
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

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with other values, which are not validated: dotted key -> value."""
        config = self
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            update = {section: getattr(config, section).model_copy(update={name: value})} if section else {name: value}
            config = config.model_copy(update=update)
        return config

    @model_validator(mode="after")
    def _a_simple_crop_has_a_border(self) -> Config:
        if self.data.train_crop == "simple" and self.model.image_size < 5:
            raise ValueError(
                f"model.image_size must be at least 5 with data.train_crop=simple, which mirrors 4 pixels at each border, got "
                f"{self.model.image_size}"
            )
        return self

    @model_validator(mode="after")
    def _targets_are_on_both_sides_of_the_threshold(self) -> Config:
        train, classes = self.train, self.model.num_classes
        if train.loss == "bce" and train.bce_threshold is not None:
            # Targets of a class that an image shows, and of one that it does not.
            absent, present = train.label_smoothing / classes, 1 - train.label_smoothing + train.label_smoothing / classes
            if absent > train.bce_threshold:
                raise ValueError(
                    f"train.loss=bce requires targets of at most train.bce_threshold {train.bce_threshold:g} for classes that are not "
                    f"shown, got {absent:.2g} for {classes} classes with train.label_smoothing {train.label_smoothing:g}: set "
                    f"train.label_smoothing=0, or a higher threshold"
                )
            if present <= train.bce_threshold:
                raise ValueError(
                    f"train.loss=bce requires a train.bce_threshold below the target of a class that is shown, {present:.3g} with "
                    f"train.label_smoothing {train.label_smoothing:g}, got {train.bce_threshold:g}: set a lower threshold"
                )
        return self

    @model_validator(mode="after")
    def _groups_fill_the_micro_batch(self) -> Config:
        micro, group = self.train.micro_batch_size, self.augment.unit
        if isinstance(micro, int) and micro % group:
            raise ValueError(
                f"augment.mix_group must divide train.micro_batch_size {micro}, got {group} ({micro} / {group} = {micro / group:.4g} groups): "
                f"set train.micro_batch_size to a multiple of {group}"
            )
        return self
