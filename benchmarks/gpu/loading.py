"""Stages ``decode``, ``loader`` and ``pixels``: whether the GPU decodes images, how fast batches of a recipe come, and how alike they are."""

from __future__ import annotations

import os
import resource
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.common import Context, Rows, Values, has_module, reason, synchronize

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.loader.loader import Loader

_PROBE = "pipeline.loader.probe"
_TOLERATED = 2.0  # levels of 255


def measure(context: Context) -> Rows:
    if not has_module("nvidia.dali"):
        yield {"failed": "DALI is not there"}
    elif context.stage == "decode":
        yield decoding(context)
    elif context.options.get("decode") == "gpu" and context.decode == "cpu":
        yield {"skipped": "decoding on the GPU has failed when it was tried out"}
    else:
        yield from [speed(context)] if context.stage == "loader" else differences(context)


def decoding(context: Context) -> Values:
    """Where the loader may decode: the verdict of the package's own trial, which asks a process of its own."""
    if not has_module(_PROBE):
        return {"note": "this code does not try out the GPU's decoder: the CPU decodes, but in cases about the GPU"}
    from pipeline.shards.shard_set import ShardSet

    verdict = import_module(_PROBE).decoding_verdict(ShardSet(str(context.shards), "train"), context.device)
    return {"decodes": verdict.form, "says": verdict.reason or "as the CPU does"}


def configs(context: Context) -> dict[str, Config]:
    """Recipes by name."""
    from pipeline.config import load_config

    words = [f"data.path={context.shards}", f"model.image_size={context.image_size}"]
    words += [f"train.micro_batch_size={context.batch}", f"train.global_batch_size={context.batch}"]
    plain = ["augment.rand_augment_ops=0", "augment.erasing=0", "augment.mixup=0", "augment.cutmix=0"]
    recipe = "configs/pervit_t.yaml"
    return {"full recipe": load_config(recipe, words), "crop and flip": load_config(recipe, [*words, *plain])}


def build(context: Context, plan: Any, config: Config, decode: str) -> Loader:
    """A loader whose batches are for this context's device."""
    from pipeline.loader.loader import Loader

    data = config.data.model_copy(update={"decode": decode if context.device.type == "cuda" else "cpu"})
    form: Values = {"form": context.decode} if context.decode == "whole" else {}
    return Loader(plan, data, context.device, len(os.sched_getaffinity(0)), **form)


def train_batches(context: Context, config: Config) -> Any:
    from pipeline.loader.batches import TrainBatches
    from pipeline.shards.shard_set import ShardSet

    return TrainBatches.of_run(ShardSet(str(context.shards), "train"), config)


def speed(context: Context) -> Values:
    """images/s with nothing else to do, and the CPU time of an image."""
    warm, timed = (1, 2) if context.miniature else (8, 24)
    config = configs(context)[context.options["recipe"]]
    loader = build(context, train_batches(context, config), config, context.options["decode"])
    try:
        for _ in range(warm):
            next(loader)
        synchronize(context.device)
        began, cpu = time.perf_counter(), _cpu_seconds()
        for _ in range(timed):
            next(loader)
        synchronize(context.device)
        images = timed * context.batch
        rate, used = images / (time.perf_counter() - began), _cpu_seconds() - cpu
    finally:
        loader.close()
    return {"images_per_second": rate, "cpu_ms_per_image": 1e3 * used / images}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def differences(context: Context) -> Rows:
    """The same batches twice: evaluation, crop and flip, full recipe without mixing, which would spread one image's over others."""
    from pipeline.loader.batches import EvalBatches
    from pipeline.shards.shard_set import ShardSet

    recipes = configs(context)
    full, plain = recipes["full recipe"], recipes["crop and flip"]
    unmixed = full.model_copy(update={"augment": full.augment.model_copy(update={"mixup": 0.0, "cutmix": 0.0, "erasing": 0.0})})
    evaluation = EvalBatches(
        shards=ShardSet(str(context.shards), "val"),
        image_size=context.image_size,
        batch_size=context.batch,
        eval_crop=plain.data.eval_crop,
    )
    cases = {
        "evaluation": (evaluation, plain),
        "crop and flip": (train_batches(context, plain), plain),
        "RandAugment": (train_batches(context, unmixed), unmixed),
    }
    for name, (plan, config) in cases.items():
        row = {"case": name}
        try:
            yield row | compare(context, plan, config)
        except Exception as error:
            yield row | {"failed": reason(error)}


def compare(context: Context, plan: Any, config: Config) -> Values:
    """Differences of pixels over a few batches."""
    loaders = [build(context, plan, config, place) for place in ("gpu", "cpu")]
    scale = 255 * torch.tensor(config.data.std).view(1, 3, 1, 1)
    most, total, beyond, count = 0.0, 0.0, 0, 0
    try:
        for _ in range(1 if context.miniature else 4):
            batches = [next(loader) for loader in loaders]
            first, second = (batch.images.float().cpu() for batch in batches)
            valid = batches[0].valid.cpu()
            levels = ((first - second).abs() * scale)[valid]
            most, total = max(most, levels.max().item()), total + levels.double().sum().item()
            beyond, count = beyond + int((levels > _TOLERATED).sum()), count + levels.numel()
    finally:
        for loader in loaders:
            loader.close()
    return {"largest": most, "mean": total / count, f"beyond_{_TOLERATED:g}_levels": beyond / count}
