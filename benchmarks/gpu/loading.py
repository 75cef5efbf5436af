"""Stages ``loader`` and ``pixels``: batches of the full recipe, decoded on the GPU and on the CPU: how fast, and how alike."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.common import Context, Rows, Values, has_key, has_module, reason, synchronize

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.loader.loader import Loader

_TOLERATED = 2.0  # levels of 255


def measure(context: Context) -> Rows:
    if not has_module("nvidia.dali"):
        yield context.stage, {"failed": "DALI is not there"}
        return
    yield from speed(context) if context.stage == "loader" else differences(context)


def configs(context: Context) -> dict[str, Config]:
    """Recipes by name."""
    from pipeline.config import load_config

    words = [f"data.path={context.shards}", f"model.image_size={context.image_size}"]
    words += [f"train.micro_batch_size={context.batch}", f"train.global_batch_size={context.batch}"]
    plain = ["augment.rand_augment_ops=0", "augment.erasing=0", "augment.mixup=0", "augment.cutmix=0"]
    recipe = "configs/pervit_t.yaml"
    return {"full recipe": load_config(recipe, words), "crop and flip": load_config(recipe, [*words, *plain])}


def places(context: Context) -> dict[str, str]:
    """Where images are decoded, by name; on a machine without a GPU twice the CPU."""
    return {"CPU": "cpu", "CPU again": "cpu"} if context.miniature else {"GPU": "gpu", "CPU": "cpu"}


def build(context: Context, plan: Any, config: Config, place: str) -> Loader:
    """A loader whose batches are for this context's device, but where the code can decode only on the device, on ``place``."""
    from pipeline.loader.loader import Loader

    data, device = config.data, context.device
    if has_key("data.decode"):
        data = data.model_copy(update={"decode": place})
    elif place == "cpu":
        device = torch.device("cpu")
    return Loader(plan, data, device, len(os.sched_getaffinity(0)))


def train_batches(context: Context, config: Config) -> Any:
    from pipeline.loader.batches import TrainBatches
    from pipeline.shards.shard_set import ShardSet

    return TrainBatches.of_run(ShardSet(str(context.shards), "train"), config)


def speed(context: Context) -> Rows:
    """images/s with nothing else to do, and the CPU time of an image."""
    warm, timed = (1, 2) if context.miniature else (8, 24)
    for recipe, config in configs(context).items():
        for name, place in list(places(context).items())[: 1 if context.miniature else None]:
            try:
                loader = build(context, train_batches(context, config), config, place)
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
                yield f"{recipe}, {name}", {"images/s": rate, "CPU ms per image": 1e3 * used / images}
            except Exception as error:
                yield f"{recipe}, {name}", {"failed": reason(error)}


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
        try:
            yield name, compare(context, plan, config)
        except Exception as error:
            yield name, {"failed": reason(error)}


def compare(context: Context, plan: Any, config: Config) -> Values:
    """Differences of pixels over a few batches."""
    loaders = [build(context, plan, config, place) for place in places(context).values()]
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
    return {"largest": most, "mean": total / count, f"beyond {_TOLERATED:g} levels": f"{beyond / count:.3%}"}
