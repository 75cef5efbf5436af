"""Build the engine of a run, ours without ZeRO and DeepSpeed's with it, from the run's config alone, and step its optimizer."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.cluster.rendezvous import quiet_deepspeed
from pipeline.cluster.waits import device_waits
from pipeline.cluster.world import World
from pipeline.config import AUTO, Config, accumulation_steps
from pipeline.errors import UserError
from pipeline.optim.build import LR_SCALE, build_optimizer, optimizer_description
from pipeline.optim.plain_engine import PlainEngine
from pipeline.optim.slices import Engine as Engine
from pipeline.optim.slices import SliceOptimizer, inner_optimizer, skips_on_the_device

# Elements of a gradient bucket: 20 MB in fp32, large enough for the full bandwidth of NCCL and gloo, small enough that models of
# 8 to 90 million parameters have several, whose reduction overlaps with the rest of the backward pass. DeepSpeed's default, 5e8,
# is one bucket of 2 GB, reduced after the backward pass.
REDUCE_BUCKET = 5_000_000
GATHER_BUCKET = 50_000_000  # elements of updated weights that one all-gather collects: nothing waits for a part of them
_SHARED_BYTES = 8  # of a parameter that stage 1 shares out: AdamW's two moments
_WORTHWHILE = 0.05  # of a GPU's memory: for less, no step waits for DeepSpeed

Model = TypeVar("Model", bound=nn.Module)


def zero_stage(config: Config, world_size: int, parameters: Callable[[], int] = int, memory: int | None = None) -> int:
    """The ZeRO stage that a run takes, see :func:`choose_zero_stage`."""
    return choose_zero_stage(config, world_size, parameters, memory)[0]


def choose_zero_stage(config: Config, world_size: int, parameters: Callable[[], int], memory: int | None) -> tuple[int, str]:
    """The ZeRO stage that a run takes, and why another one than the config's, in half a sentence.

    It is 0 for one process, which has nobody to share with: stages 1 to 3 would copy every gradient into a bucket, the gradients into
    a flat shard, and keep the weights twice. Raises UserError: the optimizer cannot step on slices, as ZeRO has them.

    Args:
        parameters: counts those that learn; asked only where "auto" depends on it.
        memory: bytes of a GPU; None: the devices are CPUs, which do not wait for launches, and whose memory all processes share.
    """
    asked, optimizer = config.train.zero_stage, optimizer_description(config.optim)
    if world_size == 1:
        return 0, "" if asked in (0, AUTO) else f"train.zero_stage {asked} has nothing to share out on one process"
    if isinstance(asked, int):
        if asked and not optimizer.takes_slices:
            named = f"optim.name={config.optim.name}, which needs whole parameters"
            problem = f"train.zero_stage must be 0 on several processes with {named}, got {asked}"
            raise UserError(problem, "set train.zero_stage=0")
        return asked, ""
    if not optimizer.takes_slices:
        return 0, f"auto: {config.optim.name} needs whole parameters"
    if memory is None:
        return 1, "auto: the devices are CPUs"
    saved = _SHARED_BYTES * parameters() * (1 - 1 / world_size)
    compared = f"stage 1 saves {saved / 2**30:.2f} GiB, {saved / memory:.1%} of a GPU's {memory / 2**30:.0f}"
    return (0 if saved < _WORTHWHILE * memory else 1), f"auto: {compared}"


def deepspeed_config(config: Config, world_size: int) -> dict:
    """DeepSpeed's config, for a stage from 1 on. Raises UserError: the batch sizes do not divide."""
    return {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": accumulation_steps(config.train, world_size, config.augment.unit),
        "gradient_clipping": config.optim.clip_grad_norm or 0.0,
        "zero_optimization": {
            "stage": zero_stage(config, world_size),
            "overlap_comm": world_size > 1,
            "reduce_bucket_size": REDUCE_BUCKET,
            "allgather_bucket_size": GATHER_BUCKET,
            # With a threshold, small parameters stay gathered and differ in the last bit after a resume.
            "stage3_param_persistence_threshold": 0,
            # One flat shard for each parameter group, however large: optimizers that need whole parameters take a group at a time.
            "sub_group_size": 10**15,
        },
        "zero_allow_untested_optimizer": True,
        # Autocast keeps parameters, gradients and optimizer state in fp32 and works with BatchNorm; DeepSpeed's own
        # bf16 section does not. The empty list keeps gradients in fp32 during communication too.
        "torch_autocast": {
            "enabled": config.train.precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "steps_per_print": 10**9,  # never: the run has its own log
        # It waits for the whole device, the loader's streams too, in every forward pass and step.
        "timers": {"throughput": {"enabled": False}},
    }


def build_engine(model: Model, config: Config, world: World, optimizer: torch.optim.Optimizer | None = None) -> Engine[Model]:
    """Wrap the model for training, sharded over the ranks as :func:`zero_stage` says. Collective. ``optimizer``: instead of the
    config's; each of its groups has the ``names`` of its parameters."""
    model.to(world.device)
    optimizer = optimizer or build_optimizer(model, config.optim, config.train.precision)
    engine: Any
    if zero_stage(config, world.size) == 0:
        engine = PlainEngine(model, optimizer, optimizer_description(config.optim).takes_slices, config, world)
    else:
        with quiet_deepspeed():
            import deepspeed

            # Its caution about optimizers that it does not know, which are tried here.
            logging.getLogger("DeepSpeed").addFilter(
                lambda record: "ZeRO with an untested optimizer" not in record.getMessage()
            )
            with _groups_with_timeout(config.distributed.collective_timeout):
                settings = deepspeed_config(config, world.size)
                engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    if engine.zero_optimization_stage() in (1, 2):
        skip_on_the_device(engine.optimizer)
        if world.device.type == "cuda":
            wait_for_the_reduction_only(engine.optimizer)
    inner = inner_optimizer(engine)
    if isinstance(inner, SliceOptimizer):
        inner.place(engine, world)
    return engine


@contextmanager
def _groups_with_timeout(seconds: float) -> Iterator[None]:
    """Give process groups made in the block a timeout.

    DeepSpeed clones the world's group for the gradients without naming one, and PyTorch gives a group of NCCL 10 minutes then:
    a rank that stalls would end the others long before the heartbeat names it.
    """
    new_group = dist.new_group
    dist.new_group = partial(new_group, timeout=timedelta(seconds=seconds))
    try:
        yield
    finally:
        dist.new_group = new_group


def set_learning_rate(engine: Engine, lr: float) -> None:
    """Set the learning rate of the next step, of which layer-wise decay gives each group its fraction."""
    for group in engine.optimizer.param_groups:
        own = lr * group.get(LR_SCALE, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


def micro_batches(engine: Engine, count: int | None = None) -> Iterator[int]:
    """Count the micro-batches of a step from 0, ``count`` of them or those of the config; each weight is cast to bf16 once for all."""
    copies = engine.computing_weights() if isinstance(engine, PlainEngine) else nullcontext()
    with weights_cast_once(engine.zero_optimization_stage()), copies:
        for number in range(count or engine.gradient_accumulation_steps()):
            if count:
                engine.set_gradient_accumulation_boundary(number == count - 1)
            yield number


@contextmanager
def weights_cast_once(stage: int) -> Iterator[None]:
    """Autocast keeps the weights that it has cast to bf16 until the block ends: the micro-batches of a step.

    It would forget them after every forward pass, although they change with the optimizer's step only. Results are the same to
    the bit: a copy passes its gradients on to the fp32 weight, where they are summed. Not under ZeRO 3, which would then hold
    the whole model, nor in a recomputation on a GPU, which runs in a thread of autograd with a count of its own.
    """
    if stage == 3:
        yield
        return
    torch.autocast_increment_nesting()  # the outermost context empties the cache when it ends: be that, without casting here
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def optimizer_step(engine: Engine) -> float | Tensor | None:
    """Step the optimizer if this micro-batch completes an accumulation; a non-finite gradient skips the step. Collective.
    Returns the global gradient norm before clipping, the same on all ranks; not finite if the step was skipped. None between
    steps."""
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return None
    if isinstance(engine, PlainEngine):
        return engine.update()
    engine.step()  # checks the gradients of all ranks for inf and NaN itself
    return engine.get_global_grad_norm() if engine.was_step_applied() else math.inf  # type: ignore[attr-defined]


def was_taken(norm: float | Tensor) -> bool | Tensor:
    """Whether the step with this gradient norm was taken; () bool on the device that has the norm."""
    return norm < math.inf


def wait_for_the_reduction_only(optimizer: Any) -> None:
    """With ``overlap_comm``, DeepSpeed's ZeRO 1 and 2 wait for the whole device after the last bucket, and so for the loader's
    streams. What follows needs the reduced gradients only: the current stream waits for the reduction's."""
    from deepspeed.accelerator import get_accelerator

    accelerator, epilogue = get_accelerator(), optimizer.independent_gradient_partition_epilogue

    def wait(device: int | None = None) -> None:
        with device_waits():
            accelerator.current_stream().wait_stream(optimizer.reduction_stream)

    def with_stream_wait() -> None:
        accelerator.synchronize = wait  # on the instance, in front of the class's method
        try:
            epilogue()
        finally:
            del accelerator.synchronize

    optimizer.independent_gradient_partition_epilogue = with_stream_wait


def skip_on_the_device(optimizer: Any) -> None:
    """Let the optimizer within skip a step whose norm is not finite, where it can: DeepSpeed would read the norm, once for a step and
    once more for each group that it clips. Its norm is computed without a wait in any case."""
    from deepspeed.runtime.zero import stage_1_and_2 as deepspeed

    if not hasattr(deepspeed, "is_invalid_grad_norm"):  # another version
        return

    def mask(norm: Tensor, device: Any = None, val: float = -1.0) -> None:  # DeepSpeed's copies a tensor from the CPU
        norm.masked_fill_(~torch.isfinite(norm), -1.0)

    deepspeed.mask_nan_or_inf_with_val_inplace = mask
    inner, compute = optimizer.optimizer, optimizer.scaled_global_norm
    if not skips_on_the_device(inner):
        return

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        norm = compute(norm_type)
        inner.found_inf = 1 - (norm < math.inf).float()
        norm.skipped_on_the_device = True
        return norm

    optimizer.scaled_global_norm = scaled_global_norm
    if not isinstance(deepspeed.is_invalid_grad_norm, partial):
        deepspeed.is_invalid_grad_norm = partial(_is_invalid, deepspeed.is_invalid_grad_norm)


def _is_invalid(asks: Callable[[Any], bool], norm: Any) -> bool:
    """DeepSpeed's ``is_invalid_grad_norm``, for norms that the device judges: never."""
    return not getattr(norm, "skipped_on_the_device", False) and asks(norm)
