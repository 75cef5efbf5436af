"""Stage ``saving``: how long a checkpoint holds up a step; the first one also allocates its pinned memory."""

from __future__ import annotations

import shutil
import statistics

from benchmarks.gpu.common import Context, Rows, has_module

_MODELS = ("pervit_t", "pervit_m")


def measure(context: Context) -> Rows:
    if not has_module("deepspeed"):
        yield context.stage, {"failed": "deepspeed is not there"}
        return
    from benchmarks.gpu.in_memory import dali_is_there

    dali_is_there()  # nothing is loaded here, but modules that are imported name it
    from benchmarks.checkpoint import Training
    from pipeline.cluster.rendezvous import disconnect, init_world
    from pipeline.config import load_config

    world = init_world()
    for model in _MODELS[: 1 if context.miniature else None]:
        words = [
            f"model.image_size={context.image_size}",
            f"train.global_batch_size={context.batch}",
            f"train.micro_batch_size={context.batch}",
            "train.activation_checkpointing=false",
            "checkpoint.keep_last=1",
        ]
        folder = context.work / "saving" / model
        training = Training(load_config(f"configs/{model}.yaml", words), world, folder)
        steps, saves = (1, 2) if context.miniature else (5, 4)
        plain, stalls, beside = [], [], []
        for _ in range(saves):
            plain += [training.step() for _ in range(steps)]
            training.save()
            beside += [training.step() for _ in range(steps)]
            stalls.append(training.saver.stall_seconds)
            training.saver.finish()
        step = statistics.median(plain)
        yield (
            model,
            {
                "step, ms": 1e3 * step,
                "first save holds it up, ms": 1e3 * stalls[0],
                "later ones, ms": 1e3 * statistics.median(stalls[1:]),
                "step beside a save": statistics.median(beside) / step,
            },
        )
        shutil.rmtree(folder, ignore_errors=True)
    disconnect()
