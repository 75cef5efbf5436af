"""Define the config keys of model, training and optimizer, and how micro-batches add up to the global batch; see ``sections``."""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.config.values import (
    MAX_BATCH,
    MAX_EPOCHS,
    MAX_SIDE,
    BatchSize,
    Count,
    Epochs,
    Fraction,
    GlobalBatchSize,
    PlainValues,
    PositiveInt,
    PositiveRate,
    Rate,
    Section,
    Share,
    Steps,
    Text,
)
from pipeline.errors import UserError, counted, shown

BUILT_IN_OPTIMIZERS = ("adamw", "lamb", "muon", "sgd")  # optim.name; others are module:Class
AUTO = "auto"  # what a start settles, such as train.micro_batch_size: as many images as fit into memory
_TEACHER_LIBRARIES = ("torchvision:", "timm:")  # what train.teacher begins with if it is not a run


class ModelConfig(Section):
    name: Annotated[Text, Field(max_length=200)] = "pervit_t"
    """Model name; `pervit models` lists them. `timm:NAME`: a classifier of timm. `module:build`: one of a function or class, in a file in the current folder or on PYTHONPATH."""
    image_size: Annotated[int, Field(ge=1, le=MAX_SIDE)] = 224
    """Side of the square input, in pixels."""
    num_classes: PositiveInt = 1000
    """Number of classes; must match the shards."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate of the last block."""
    switches: PlainValues = {}
    """Ablation switches of the model family, or arguments of timm's model; `pervit models NAME` lists them."""
    options: PlainValues = {}
    """With `module:build`, or a model of an installed package: arguments of its function, such as `{width: 64}`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model is built with beside the other keys."""
        return {**self.switches, **self.options}


class TrainConfig(Section):
    init_from: Text | None = None
    """Fine-tuning: initialize from a run folder, a file with a state dict (this project's or the authors'), or `timm:NAME`, timm's weights on the Hugging Face hub; null: random initialization."""
    freeze: Literal["backbone"] | Annotated[list[Text], Field(min_length=1)] | None = None
    """What does not learn: `backbone`, all but the classifier, or a list of parameters or modules, such as `[stem, "blocks.[0-5]"]`. It gets no gradient and no optimizer state, and its BatchNorm keeps the statistics that it has; null: all learns."""
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
    zero_stage: Annotated[int, Field(ge=0, le=3)] | Literal["auto"] = "auto"
    """ZeRO stage: 0 none; by DeepSpeed 1 optimizer state, 2 + gradients, 3 + parameters sharded over the ranks. One process runs 0. auto: 0 where stage 1 would save less than 5 % of a GPU's memory, else 1; on CPUs 1."""
    deterministic: bool = False
    """Only algorithms that add in a fixed order, so that a run repeats bit for bit on GPUs too, and is somewhat slower."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass: less memory, about a quarter more time."""
    compile: Literal["auto", "off", "blocks", "model", "graphs"] = "auto"
    """torch.compile. blocks: each block, Φp and the loss. model: the forward pass as a whole. graphs: model, and the step as a CUDA graph. auto: graphs on one GPU without accumulation, recomputation, teacher, deterministic or size_schedule, blocks on others with zero_stage 0 to 2, else off."""
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
        """``micro_batch_size`` as a number. Raises UserError: it is "auto", which the start of a training settles."""
        if isinstance(self.micro_batch_size, str):
            raise UserError("train.micro_batch_size must be a number here, got auto, which only a training settles", "set one")
        return self.micro_batch_size

    @field_validator("micro_batch_size", "zero_stage", mode="before")
    @classmethod
    def _a_number_or_auto(cls, value: Any) -> Any:
        if isinstance(value, str) and value != AUTO and not value.strip().isdigit():
            raise ValueError("must be a whole number or auto")
        return value

    @field_validator("compile", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML 1.1 reads `off` as

    def misfits(self) -> Iterator[str]:
        library = (self.teacher or "").startswith(_TEACHER_LIBRARIES)
        if library and not self.teacher_weights:
            yield f"train.teacher={self.teacher} requires train.teacher_weights, got null: name a local file, because nothing is downloaded"
        if self.teacher_weights and not library:
            names = " or ".join(f"{library}NAME" for library in _TEACHER_LIBRARIES)
            yield f"train.teacher_weights {self.teacher_weights} requires train.teacher {names}, got {self.teacher or 'null'}"
        if self.loss == "bce" and self.teacher:
            yield (
                f"train.loss must be cross_entropy with train.teacher={self.teacher}, got bce, for which hard distillation (DeiT, Eq. 3) "
                "is not defined: set train.loss=cross_entropy, or train.teacher=null"
            )


class OptimConfig(Section):
    """AdamW (Loshchilov & Hutter, 2019), LAMB, Muon, SGD or any other; norms, biases and other 1-D parameters are not decayed."""

    name: Annotated[Text, Field(max_length=200)] = "adamw"
    """The optimizer. adamw. lamb: of large batches and DeiT III, with clip_grad_norm 1.0 as timm's and apex's. muon: for the matrices of the blocks and for convolutions, AdamW for all else. sgd: with Nesterov's momentum, as timm's. `module:Class`: any class of `torch.optim.Optimizer`, such as `torch.optim:NAdam`, or one in a file in the current folder or on PYTHONPATH."""
    options: PlainValues = {}
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
    """Weight decay, decoupled in the built-in optimizers; in sgd it is part of the gradient."""
    layer_decay: Share | None = None
    """Layer-wise decay of the learning rate, for fine-tuning: each layer below the classifier learns at this fraction of the one above it, such as 0.75; null: all at the same rate."""
    decay_embeddings: bool = False
    """Also decay class tokens and absolute position embeddings, as ConViT's published runs do."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's and LAMB's moment estimates."""
    momentum: Fraction = 0.95
    """Decay rate of Muon's and SGD's momentum; usual for sgd is 0.9."""
    eps: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """AdamW's and LAMB's epsilon, added to the denominator."""
    clip_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Maximum global gradient norm; null: no clipping."""

    def misfits(self) -> Iterator[str]:
        if self.name in BUILT_IN_OPTIMIZERS:
            if self.options:
                yield f"optim.options requires optim.name=module:Class, got {self.name}: remove optim.options"
            if self.name == "sgd" and not self.momentum:
                yield "optim.momentum must be above 0 with optim.name=sgd, got 0: set it, or optim.name=torch.optim:SGD"
            return
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", self.name):
            built_in = ", ".join(f"'{known}'" for known in BUILT_IN_OPTIMIZERS)
            yield f"optim.name must be {built_in} or a class as 'module:Class', got {shown(self.name)}"
        for key in ("betas", "momentum", "eps"):
            if (given := getattr(self, key)) != type(self).model_fields[key].default:
                yield (
                    f"optim.{key} must be left at its default with optim.name={self.name}, got {given}: "
                    f"set optim.options={{{key}: ...}} instead"
                )
        for key in ("lr", "weight_decay", "params"):
            if key in self.options:
                yield f"optim.options must not have {key}, which the run sets: set optim.{key} instead"


def accumulation_steps(train: TrainConfig, world_size: int, unit: int = 1) -> int:
    """Micro-batches per rank and optimizer step: global batch size / (micro-batch size * world size). A micro-batch must be a
    multiple of ``unit`` (``config.augment.unit``), which the suggested values respect. Raises UserError: the batch sizes do not
    divide; the message shows the arithmetic and values that work."""
    global_batch, micro = train.global_batch_size, train.micro_batch
    per_pass = micro * world_size
    if global_batch % per_pass:
        must = f"must be a multiple of train.micro_batch_size {micro} x {counted(world_size, 'process')} = {per_pass}"
        got = f"{global_batch} ({global_batch} / {per_pass} = {global_batch / per_pass:.4g} accumulation steps)"
        raise UserError(f"train.global_batch_size {must}, got {got}", _remedy(global_batch, micro, world_size, unit))
    return global_batch // per_pass


def fitting_micro_batches(train: TrainConfig, world_size: int, unit: int = 1) -> list[int]:
    """The micro-batch sizes that a run may have on so many processes, ascending; for the arguments see
    :func:`accumulation_steps`. Raises UserError: there are none."""
    global_batch, whole = train.global_batch_size, unit * world_size
    if global_batch % whole:
        of_units = f" in groups of {unit} images (augment.mix_group)" if unit > 1 else ""
        got = f"got {global_batch} ({global_batch} / {whole} = {global_batch / whole:.4g})"
        problem = f"train.global_batch_size must be a multiple of {whole} for {world_size} processes{of_units}, {got}"
        raise UserError(problem, _remedy(global_batch, None, world_size, unit))
    return [unit * number for number in _divisors(global_batch // whole) if unit * number <= MAX_BATCH]


def _remedy(global_batch: int, micro: int | None, world_size: int, unit: int) -> str:
    """Micro-batch sizes (None: any) and world sizes that fit this global batch size, which a run cannot change once started."""
    if global_batch % unit:  # no run can have started with it, so suggest another global batch size
        needed = unit * world_size
        return f"set train.global_batch_size to a multiple of {needed} (augment.mix_group {unit} x {world_size} processes)"
    fitting = _divisors(global_batch // unit)  # world sizes
    nearest = max((n for n in fitting if n < world_size), default=0), min((n for n in fitting if n > world_size), default=0)
    starts = []
    for number in filter(None, nearest):
        best = micro and _largest(global_batch, number, micro, unit)
        starts.append(f"{number}" if best == micro else f"{number} with train.micro_batch_size={best}")
    remedies = [f"start another number of processes, such as {' or '.join(starts)}"] if starts else []
    if micro and world_size in fitting:
        remedies.insert(0, f"set train.micro_batch_size to {_largest(global_batch, world_size, micro, unit)}")
    return ", or ".join(remedies)


def _largest(global_batch: int, world_size: int, micro: int, unit: int) -> int:
    """The largest micro-batch size up to ``micro``, itself a multiple of ``unit``, that fits; ``unit`` always does."""
    return unit * max(n for n in _divisors(global_batch // world_size // unit) if n * unit <= micro)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
