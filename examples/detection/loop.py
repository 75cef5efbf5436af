"""Train a detector on the package's parts: its training step, schedule, checkpoints, log and agreement between ranks.

Average precision (AP) is that of COCO's own program, pycocotools, over the images of all ranks.
"""

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.detection.config import DetectionConfig
from examples.detection.data import Batch, batches, check_sets, read_coco, read_image
from examples.detection.model import build_detector
from pipeline.checkpoint import loading
from pipeline.checkpoint.folder import sweep
from pipeline.checkpoint.manifest import RunState
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement, do_in_main
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import accumulation_steps, config_to_yaml, flatten, is_free
from pipeline.errors import PREEMPTED, UserError
from pipeline.files import replace_text
from pipeline.logs.run_log import RunLog
from pipeline.metrics import recording
from pipeline.optim.averages import StepStatistics
from pipeline.optim.build import optimizer_description
from pipeline.optim.description import MATRICES
from pipeline.optim.engine import build_engine
from pipeline.runs import CONFIG
from pipeline.runs.state import is_complete
from pipeline.step.train_step import TrainState, train_step
from pipeline.stream.schedule import Schedule
from pipeline.training.folder import config_hash, open_run_folder

_NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")  # the first six of COCOeval.stats
Found = list[dict[str, Any]]  # detections in COCO's format for results


def connect_and_train(config: DetectionConfig, stop: StopSignal) -> int:
    """Join the other ranks and train to the end of the schedule, from the newest intact checkpoint if there is one. Returns the
    exit code: 0 at the end, ``PREEMPTED`` after a signal, with a checkpoint. Raises UserError: config, data and run folder do
    not fit together, or a gradient is not finite."""
    folder = Path(config.output_dir)
    world = init_world(config.distributed.collective_timeout, folder)
    torch.backends.cudnn.benchmark = False  # images differ in size, and each size would be tried out
    with Heartbeat(world, config.distributed, folder) as heartbeat, ExitStack() as stack:
        stopped = Training(config, world, stop, heartbeat, stack).run()
    disconnect()
    return PREEMPTED if stopped else 0


class Training:
    """A run on one rank, from its newest checkpoint on; ``step`` is the last one that is done. All methods are collective."""

    def __init__(self, config: DetectionConfig, world: World, stop: StopSignal, heartbeat: Heartbeat, stack: ExitStack) -> None:
        self.config, self.world, self.stop, self.heartbeat = config, world, stop, heartbeat
        data, train, masks, folder = config.data, config.train, config.has_masks, Path(config.output_dir)
        self.train_set = read_coco(Path(data.train_annotations), Path(data.train_images), masks, "data.train_annotations")
        self.val_set = read_coco(Path(data.val_annotations), Path(data.val_images), masks, "data.val_annotations")
        check_sets(self.train_set, self.val_set)
        self.images, categories = self.train_set.trained, len(self.train_set.categories)
        self.schedule = Schedule(len(self.images), train.global_batch_size, train.epochs, train.max_steps)
        self.settings = config.for_package(categories)
        self.accumulation = accumulation_steps(self.settings.train, world.size)
        if lock := open_run_folder(folder, world):
            stack.callback(lock.release)
        do_in_main(lambda: sweep(folder), world)
        verified = loading.newest_intact(folder, world)
        self.step, self.evaluation_due = 0, False
        if verified:
            check_same_run(config, self.train_set.digest, verified.state)
            self.step, self.evaluation_due = verified.state.step, verified.state.evaluation_due
        torch.manual_seed(config.seed)  # equal weights on all ranks
        model, notes = build_detector(config, categories, fresh=verified is None)
        # One group, norms and biases too, as by mmdetection's default; the package's own groups do not let these decay.
        learns = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        group = {"params": [*learns.values()], "names": [*learns], "weight_decay": config.optim.weight_decay, MATRICES: False}
        optimizer = optimizer_description(self.settings.optim).build([group], self.settings.optim, "fp32")
        self.engine: Any = build_engine(model, self.settings, world, optimizer)
        if verified:
            loading.load(self.engine, verified, None, world)
        objective: Any = model.total
        self.train_state = TrainState(self.engine, StepStatistics(model, world), None, objective)
        self.agreement = Agreement(config.distributed.collective_timeout)
        self.saver = Saver(folder, world, self.settings.checkpoint, self.agreement, lambda: heartbeat.still("saving"))
        self.log = RunLog(self.settings, world, self.step, self.schedule, flops_per_image=None)
        stack.callback(self.log.close)
        do_in_main(lambda: replace_text(folder / CONFIG, config_to_yaml(config)), world)
        for sentence in dict.fromkeys((*self.train_set.notes, *self.val_set.notes, *notes)):
            self.log.say(sentence)
        self.log.say(
            f"{config.model.detector} on {config.model.name}, {world.device}: {sum(map(torch.numel, model.parameters())):,} "
            f"parameters; {len(self.images):,} training and {len(self.val_set.images):,} validation images; "
            f"batch {train.global_batch_size} = {train.micro_batch_size} x {world.size} x {self.accumulation}; "
            f"steps {self.step} to {self.schedule.last_step}"
        )

    def run(self) -> bool:
        """Take the steps until the schedule ends or a rank has to stop; returns whether it was stopped."""
        if is_complete(self.step, self.evaluation_due, self.schedule.last_step):
            self.log.say(f"{self.config.output_dir} is complete at step {self.step}: nothing to train")
            return False
        stopping = self.agreement.ask(self.stop.received != 0)  # received while the run was built
        if not stopping and self.evaluation_due:
            self._complete_step(stopping)
        with closing(batches(self.config, self.images, self.world, self.step, self.accumulation)) as loader:
            while self.step < self.schedule.last_step and not stopping:
                self._step(loader)
                agreed = self.agreement.exchange(self.stop.received, self.saver.failed, self.saver.written)
                self.saver.settle(agreed)
                stopping = agreed.stop != 0 and self.step < self.schedule.last_step
                self.evaluation_due = self.schedule.passes(self.step, self.config.eval.every_epochs)
                self._complete_step(stopping)
        self.saver.finish()
        ends = "stopped by a signal at step {}: the same command resumes from here" if stopping else "done at step {}"
        self.log.say(ends.format(self.step))
        return stopping

    def _step(self, loader: Iterator[Batch]) -> None:
        """Take one optimizer step and log it."""
        step, lr = self.step + 1, learning_rate(self.step, self.schedule, self.config)

        def next_batch() -> Any:
            self.heartbeat.at(step, "reading data")
            batch = next(loader)
            self.heartbeat.at(step, "training")
            return batch

        self.engine.train()
        with recording() as metrics:
            result = train_step(self.train_state, next_batch, lr, self.config.seed)
        if not result.taken:
            problem = f"the gradient of step {step} must be finite, got {float(result.grad_norm)}"
            remedy = "lower optim.lr, raise optim.warmup_steps, or set optim.clip_grad_norm"
            raise UserError(problem, f"{remedy}; the newest checkpoint is from before this step")
        self.step = step
        self.log.step(step, metrics)

    def _complete_step(self, stopping: bool) -> None:
        """After a step, evaluate and save a checkpoint if they are due; with ``stopping`` the next start evaluates."""
        every = self.config.checkpoint.every_steps
        saves = stopping or self.evaluation_due or (every is not None and self.step % every == 0)
        if self.evaluation_due and not stopping:
            self.log.flush()
            self.log.scores(self.step, self._evaluate())
            self.evaluation_due = False
        if saves:
            self.heartbeat.at(self.step, "saving")
            self.log.flush(to_disk=True)  # the rows that lead to a checkpoint are there when it is
            state = RunState(
                step=self.step,
                samples=self.schedule.samples(self.step),
                skipped_steps=0,
                config={**self.settings.model_dump(mode="json"), "detection": self.config.model_dump(mode="json")},
                config_hash=config_hash(self.settings),
                classes=[*self.train_set.categories.values()],
                data={"samples": len(self.images), "fingerprint": self.train_set.digest},
                world_size=self.world.size,
                zero_stage=0,
                last_step=self.schedule.last_step,
                evaluation_due=self.evaluation_due,
            )
            self.saver.save(self.engine, None, state)
            self.log.restart_clock()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Detect in all validation images, write ``detections.json`` and score it: percent by name on every rank, AP, AP50, ...
        of boxes, and mask_AP, ... where the detector has masks. Raises UserError: an image cannot be read."""
        world, coco, masks, detector = self.world, self.val_set, self.config.has_masks, self.engine.module.eval()
        category_ids = [-1, *coco.categories] if masks else [*coco.categories]  # with masks, label 0 is the background
        found, size = Found(), self.config.eval.batch_size * world.size
        for first in range(0, len(coco.images), size):
            self.heartbeat.at(self.step, "evaluating")
            part = coco.images[first + world.rank : first + size : world.size]
            detected = detector(Batch([read_image(image).to(world.device) for image in part])) if part else []
            results = [each for image, its in zip(part, detected) for each in as_results(image.id, its, category_ids)]
            for of_rank in world.gather(results):
                found += of_rank if world.is_main else []

        def score_all() -> dict[str, float]:
            replace_text(Path(self.config.output_dir, "detections.json"), json.dumps(found))
            of_masks = score(coco.path, found, "segm") if masks else {}
            return {**score(coco.path, found, "bbox"), **{f"mask_{name}": value for name, value in of_masks.items()}}

        return world.from_main(do_in_main(score_all, world))


def check_same_run(config: DetectionConfig, data: str, before: RunState) -> None:
    """Check that a run continues with its config and its data, whose digest is ``data``. Raises UserError: a key differs that
    determines the weights, or the training annotations do."""
    begun, now = before.config.get("detection"), flatten(config)
    if begun is None:
        raise UserError(f"{config.output_dir} has the checkpoints of a classifier", "choose another output_dir")
    earlier = begun | {f"{name}.{key}": part[key] for name, part in begun.items() if isinstance(part, dict) for key in part}
    paths = ("data.train_", "data.val_")  # the annotations are compared by content
    decisive = [key for key in now if not is_free(key) and not key.startswith(paths)]
    if changed := [f"{key}={earlier.get(key)}, got {now[key]}" for key in decisive if earlier.get(key) != now[key]]:
        problem = f"{config.output_dir} was started with {'; with '.join(changed)}"
        raise UserError(problem, "set it back, or choose another output_dir")
    if before.data["fingerprint"] != data:
        problem = f"{config.output_dir} was started with other annotations than {config.data.train_annotations}"
        raise UserError(problem, "set data.train_annotations back, or choose another output_dir")


def learning_rate(step: int, schedule: Schedule, config: DetectionConfig) -> float:
    """Linear warm-up, then multi-step decay, both by the steps before this one, as mmdetection's 1x schedule."""
    optim = config.optim
    decays = sum(schedule.epoch(step) >= epoch for epoch in optim.decay_epochs)
    warmup = min(1.0, step / optim.warmup_steps) if optim.warmup_steps else 1.0
    return optim.lr * optim.decay_factor**decays * (optim.warmup_factor + (1 - optim.warmup_factor) * warmup)


def as_results(image_id: int, detected: dict[str, torch.Tensor], category_ids: list[int]) -> Found:
    """An image's detections; ``category_ids`` by label."""
    boxes = detected["boxes"].cpu().double()
    boxes[:, 2:] -= boxes[:, :2]  # x, y, width, height
    results = [
        {"image_id": image_id, "category_id": category_ids[label], "bbox": [round(value, 2) for value in box], "score": score}
        for label, score, box in zip(detected["labels"].tolist(), detected["scores"].tolist(), boxes.tolist())
    ]
    if "masks" in detected:
        from pycocotools import mask

        drawn = (detected["masks"][:, 0] > 0.5).cpu().numpy().astype(np.uint8)  # (n, H, W); He et al., ICCV 2017, Sec. 3.1
        for result, pixels in zip(results, drawn):
            encoded = mask.encode(np.asfortranarray(pixels))
            result["segmentation"] = {"size": encoded["size"], "counts": encoded["counts"].decode()}
    return results


def score(truth: Path, found: Found, kind: str) -> dict[str, float]:
    """COCO's metrics in percent for a COCO file and a ``kind``, "bbox" or "segm", by the names of ``_NAMES``, without the sizes
    of which there is no ground truth; -100 without any, as pycocotools has it."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found:  # pycocotools cannot load an empty list
        return dict.fromkeys(_NAMES, 0.0)
    beside = "bbox" if kind == "segm" else ""  # beside a box pycocotools would take an object's area from that
    copies = [{key: value for key, value in each.items() if key != beside} for each in found]  # it writes into them
    with redirect_stdout(io.StringIO()):
        known = COCO(str(truth))
        evaluation = COCOeval(known, known.loadRes(copies), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: 100 * value for name, value in zip(_NAMES, evaluation.stats.tolist()) if value >= 0 or "_" not in name}
