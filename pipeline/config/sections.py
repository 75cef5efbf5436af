"""Every key of a config, typed, with its default and its meaning."""

from __future__ import annotations

import math
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

# Where a number stops to make sense: far beyond any recipe, and far below what would overflow, or take memory or time without
# end. A typing error (a zero too many, another unit) is a sentence, not a run that hangs.
MAX_SHAPE = 2**20  # classes, widths: what tensors are made of
MAX_SIDE = 2**12  # pixels: attention among more would not fit into any memory
MAX_BATCH = 2**14  # images per process and forward pass: likewise
MAX_GLOBAL_BATCH = 2**20  # images per optimizer step; the largest published ones are below 2**17
MAX_STEPS = 10**12  # whatever counts steps or events; times the largest batch it is still a 64-bit integer
MAX_EPOCHS = 1e6  # the random numbers' counter has 32 bits for the epoch
MAX_SECONDS = 30 * 24 * 3600.0  # collectives and stores overflow at less than the largest float
MAX_RATE = 1e3  # learning rate, weight decay: float32 is exact enough up to there
MAX_SWITCH = 2**63 - 1  # a model's own bounds are narrower: this one is for what JSON and checkpoints can hold

PositiveInt = Annotated[int, Field(ge=1, le=MAX_SHAPE)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]
Count = Annotated[int, Field(ge=0, le=MAX_STEPS)]
BatchSize = Annotated[int, Field(ge=1, le=MAX_BATCH)]
GlobalBatchSize = Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH)]
Epochs = Annotated[float, Field(gt=0, le=MAX_EPOCHS, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False)]
PositiveRate = Annotated[float, Field(gt=0, le=MAX_RATE, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Aspect = Annotated[float, Field(ge=0.01, le=100)]
Mean = Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)]  # of pixels on [0, 1], not up to 255
Deviation = Annotated[float, Field(ge=1e-3, le=10, allow_inf_nan=False)]


def _printable(text: str) -> str:
    for character in text:
        if unicodedata.category(character) in ("Cc", "Zl", "Zp"):
            raise ValueError(f"must not hold the control character U+{ord(character):04X}")
    return text


Text = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_printable)]


class Section(BaseModel):
    """A part of the tree. Frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, value: Any, info) -> Any:
        # pydantic would read `true` as 1. (It reads "5e-4" as a number, which YAML takes for text: welcome.)
        annotation = str(cls.model_fields[info.field_name].annotation)
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, bool) for part in parts) and "bool" not in annotation and "Any" not in annotation:
            raise ValueError("Input should be a number or text, not a truth value")
        return value


class ModelConfig(Section):
    name: Annotated[Text, Field(max_length=100)] = "pervit_t"
    """Which model: `python -m pipeline.models` lists them."""
    image_size: Annotated[int, Field(ge=1, le=MAX_SIDE)] = 224
    """Side of the square input, in pixels."""
    num_classes: PositiveInt = 1000
    """Must equal the number of classes of the shards."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate of the last block."""
    switches: dict[str, Any] = {}
    """The family's ablations, by name: `python -m pipeline.models NAME` lists them."""

    @field_validator("switches")
    @classmethod
    def _plain_values(cls, switches: dict[str, Any]) -> dict[str, Any]:
        for name, value in switches.items():
            parts = value if isinstance(value, list | tuple) else [value]
            if not all(_is_plain(part) for part in parts):
                raise ValueError(f"{name!a:.80} must be a truth value, a number, a text, null, or a list of these")
        return switches


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | bool) or (isinstance(value, int) and abs(value) <= MAX_SWITCH)


class DataConfig(Section):
    path: Text = "data/imagenet"
    """Folder that holds the shard sets (train and val)."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """DALI threads per process; null: the CPU cores shared out among the node's processes."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Batches that are decoded ahead."""
    read_ahead: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches whose files are read ahead; the memory is that many times micro_batch_size encoded images."""
    order: Literal["full", "block"] = "full"
    """full: each epoch permutes all samples. block: neighbours on disk stay close in time, for disks that are slow at random reads."""
    block_size: Annotated[int, Field(ge=1, le=2**24)] = 256
    """Samples that lie side by side in a shard and are read as one block (order block)."""
    window_blocks: Annotated[int, Field(ge=1, le=2**24)] = 64
    """Blocks whose samples are shuffled together (order block): 64 x 256 samples are about 2 GB of page cache."""
    max_bad_samples: Count = 100
    """Unreadable or damaged images: training takes a neighbour instead, an evaluation leaves them out; one more stops the run."""
    crop_scale: tuple[Share, Share] = (0.08, 1.0)
    """Area of the random crop, as a share of the image."""
    crop_ratio: tuple[Aspect, Aspect] = (3 / 4, 4 / 3)
    """Aspect ratio (width / height) of the random crop."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    eval_crop: Annotated[float, Field(ge=0.1, le=1)] = 0.875
    """Evaluation resizes the short side to image_size / eval_crop, then crops the centre (224 / 256)."""
    mean: tuple[Mean, Mean, Mean] = (0.485, 0.456, 0.406)
    """Normalization, per RGB channel, of pixels on [0, 1]."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """Normalization, per RGB channel, of pixels on [0, 1]."""

    @model_validator(mode="after")
    def _ranges_ascend(self) -> DataConfig:
        for name in ("crop_scale", "crop_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} must go from low to high, not [{low}, {high}]")
        return self


class AugmentConfig(Section):
    """What changes the pixels after the crop. Everything is off by default; the recipes in configs/ turn it on."""

    rand_augment_ops: Annotated[int, Field(ge=0, le=8)] = 0
    """RandAugment operations per image (the papers' rand-m9-mstd0.5-inc1 has 2); 0: none."""
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=10)] = 9
    """RandAugment: strength, 0 to 10."""
    rand_augment_std: Annotated[float, Field(ge=0, le=10)] = 0.5
    """RandAugment: standard deviation of the strength."""
    erasing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a rectangle of the image becomes noise."""
    mixup: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Mixup: alpha of the Beta distribution of the mixing weight; 0: none."""
    cutmix: Annotated[float, Field(ge=0, le=2)] = 0.0
    """CutMix: alpha of the Beta distribution of the share of the image that is kept; 0: none."""
    mix_switch: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of CutMix where both are on."""
    mix_group: Annotated[int, Field(ge=2, le=MAX_BATCH)] = 8
    """Consecutive images that share a mixing weight and are mixed with each other; must divide micro_batch_size."""
    repeats: Annotated[int, Field(ge=1, le=64)] = 1
    """Repeated augmentation: views of each image in a row; an epoch then shows 1/repeats of the images."""

    @field_validator("mixup", "cutmix")
    @classmethod
    def _alpha_is_zero_or_sensible(cls, alpha: float) -> float:
        if 0 < alpha < 0.01:
            raise ValueError("must be 0, or at least 0.01")
        return alpha

    @model_validator(mode="after")
    def _partners_are_other_images(self) -> AugmentConfig:
        if self.mixes and self.mix_group < 2 * self.repeats:
            raise ValueError(f"mix_group must be at least 2 x repeats = {2 * self.repeats}, not {self.mix_group}")
        return self

    @property
    def mixes(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    @property
    def unit(self) -> int:
        """What a micro-batch must be a multiple of, in images."""
        return self.mix_group if self.mixes else 1


class TrainConfig(Section):
    init_from: Text | None = None
    """Fine-tuning: a run folder, or a file with a state dict (ours or the authors'), whose weights the run begins with; null: fresh weights."""
    teacher: Text | None = None
    """Hard distillation (DeiT, Eq. 3): folder of a finished run whose model's decisions are a second label; null: none."""
    epochs: Epochs = 300
    """Length of the schedule, in passes over the training set."""
    scale_epochs: bool = False
    """Divide epochs by the share that `--subset` kept, so that the number of steps is that of the full set."""
    max_steps: Steps | None = None
    """Stop after this many optimizer steps in all; does not change the schedule. null: run to the end."""
    global_batch_size: GlobalBatchSize = 1024
    """Images per optimizer step, over all processes. The one number a recipe states."""
    micro_batch_size: BatchSize = 128
    """Images per forward pass and process; accumulation steps follow from it."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: autocast with fp32 master weights. fp32: everything in single precision. auto: bf16 where all devices have instructions for it, else fp32; a resumed run keeps its own."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO: 0 none, 1 optimizer state, 2 + gradients, 3 + parameters sharded over processes."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a quarter more time."""
    label_smoothing: Fraction = 0.1
    """Share of the target spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights and evaluate it too; null: none."""
    max_skipped_steps: Count = 0
    """Steps without a finite gradient that are skipped and counted; one more stops the run and writes down what reproduces it."""


class OptimConfig(Section):
    """AdamW (Loshchilov & Hutter, 2019); norms, biases and other 1-D parameters are not decayed."""

    lr: PositiveRate = 5e-4
    """Peak learning rate for a global batch of lr_batch_size; scaled linearly to the real one."""
    lr_batch_size: GlobalBatchSize = 512
    """The batch that lr is stated for."""
    min_lr: Rate = 1e-5
    """Learning rate at the end of the cosine."""
    warmup_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 5
    """Linear warm-up, by step."""
    warmup_lr: Rate = 1e-6
    """Learning rate of the first step."""
    weight_decay: Rate = 0.05
    """Decoupled weight decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of AdamW's moment estimates."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to AdamW's denominator."""
    clip_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Clip the global gradient norm to this; null: no clipping."""


class EvalConfig(Section):
    every_epochs: Epochs | None = 1
    """Evaluate each time this many epochs have passed, and at the end; null: only at the end."""
    batch_size: BatchSize = 128
    """Images per forward pass and process. Changes no count, and the loss only by rounding."""


class CheckpointConfig(Section):
    every_steps: Steps | None = 1000
    """Save each time this many steps have passed, and at the end; null: only at the end."""
    keep_last: Steps = 2
    """How many checkpoints stay on disk, the newest ones."""
    keep_best: bool = True
    """Also save after an evaluation with the best top-1 so far, and keep that checkpoint."""
    keep_every_steps: Steps | None = None
    """Also keep every checkpoint whose step is a multiple of this; null: none."""
    retry_seconds: Seconds = 300
    """How long a save that fails (disk full, read-only for a while) is tried again while training goes on; then the run stops."""
    accept: list[Text] = []
    """Keys that a resumed run may have otherwise than it was begun with; `data` stands for another data set."""


class LogConfig(Section):
    every_steps: Steps = 10
    """Steps between two writings of the log. Every step gets its row; this is how often they are fetched."""
    samples: bool = False
    """Write down every sample that each process trains on, with a digest of its augmentation (samples/ in output_dir)."""


class DistributedConfig(Section):
    """When the other processes give up on one."""

    silence_timeout: Annotated[float, Field(ge=5, le=100, allow_inf_nan=False)] = 60
    """Seconds without a sign of life from a process after which the others name it and end; the job scripts wait 120 for that."""
    progress_timeout: Annotated[float, Field(ge=5, le=MAX_SECONDS, allow_inf_nan=False)] = 1800
    """Seconds that a living process may stay at one place of the run (a step, a batch of an evaluation, a save)."""


class Config(Section):
    output_dir: Text = "runs/default"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard events, the resolved config."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights, sample order and augmentation."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _groups_fill_the_micro_batch(self) -> Config:
        micro, group = self.train.micro_batch_size, self.augment.unit
        if micro % group:
            raise ValueError(
                f"augment.mix_group {group} must divide train.micro_batch_size {micro} ({micro} / {group} = {micro / group:.4g} groups); "
                f"set train.micro_batch_size to a multiple of {group}"
            )
        return self
