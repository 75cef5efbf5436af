"""Define every key of a detection run; ``python -m examples.detection.config`` prints them as a Markdown table."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline import config as package
from pipeline.command_line import command_parser, run_command
from pipeline.config import DistributedConfig, Section, values
from pipeline.config.__main__ import markdown_table
from pipeline.config.values import BatchSize, Epochs, Fraction, Rate, Share, Steps, Text

Side = Annotated[int, Field(ge=16, le=values.MAX_SIDE)]


class ModelConfig(Section):
    name: Annotated[Text, Field(max_length=100)] = "posmlp_t"
    """Backbone; `pervit models` lists them."""
    switches: dict[str, Any] = {}
    """Switches of the backbone's family."""
    image_size: Side = 224
    """Image size that the backbone is built for, as in its classification config; it determines PosMLP's windows."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate of the backbone's last block."""
    init_from: Text | None = None
    """Run folder or file with the backbone's pretrained weights; null: random initialization."""
    batchnorm: Literal["frozen", "batch"] = "batch"
    """BatchNorm of the backbone's stem. frozen: the statistics of the pretrained weights. batch: those of each micro-batch."""
    detector: Literal["retinanet", "mask_rcnn"] = "retinanet"
    """Heads, by torchvision."""
    pyramid_width: Annotated[int, Field(ge=8, le=2048)] = 256
    """Channels of the feature pyramid and of the heads; the box head of Mask R-CNN has four times as many."""
    box_samples: Annotated[int, Field(ge=1, le=10**5)] = 512
    """Proposals per image on which the heads of Mask R-CNN train, at most a quarter of them on an object."""


class DataConfig(Section):
    train_images: Text = "data/coco/train2017"
    """Folder with the training images."""
    train_annotations: Text = "data/coco/annotations/instances_train2017.json"
    """COCO JSON of the training images."""
    val_images: Text = "data/coco/val2017"
    """Folder with the validation images."""
    val_annotations: Text = "data/coco/annotations/instances_val2017.json"
    """COCO JSON of the validation images."""
    short_side: Side = 800
    """Images are resized to this short side, in pixels."""
    long_side: Side = 1333
    """Longest long side, in pixels: an image that would be longer is resized to it."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Decoder threads per rank; null: the node's CPU cores divided by its ranks."""


class ScheduleConfig(Section):
    epochs: Epochs = 12
    """Length of the schedule, in passes over the training images."""
    max_steps: Steps | None = None
    """Stop after this many optimizer steps in total; the schedule stays the same. null: run to the end."""
    global_batch_size: values.GlobalBatchSize = 16
    """Images per optimizer step over all ranks."""
    micro_batch_size: BatchSize = 2
    """Images per forward pass and rank; the number of gradient accumulation steps follows from it."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast in backbone and feature pyramid, heads in fp32. fp32: single precision throughout."""


class OptimConfig(Section):
    """AdamW, all parameters decayed, as by mmdetection's default; multi-step schedule after a linear warm-up."""

    lr: values.PositiveRate = 1e-4
    """Learning rate after the warm-up."""
    weight_decay: Rate = 0.067
    """Decoupled weight decay."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**6)] = 500
    """Optimizer steps of the linear warm-up."""
    warmup_factor: Share = 1e-3
    """The warm-up begins at this fraction of the learning rate."""
    decay_epochs: Annotated[list[Annotated[float, Field(gt=0, le=1e6)]], Field(max_length=100)] = [8, 11]
    """Epochs after which the learning rate is multiplied by decay_factor."""
    decay_factor: Share = 0.1
    """See decay_epochs."""
    clip_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Maximum global gradient norm; null: no clipping."""


class EvalConfig(Section):
    every_epochs: Epochs | None = 1
    """Epochs between evaluations; there is always one at the end, and null means only that one."""
    batch_size: BatchSize = 2
    """Images per forward pass and rank."""


class CheckpointConfig(Section):
    every_steps: Steps | None = 1000
    """Steps between checkpoints; there is always one after an evaluation and at the end, and null means only these."""
    keep_last: Steps = 2
    """Number of most recent checkpoints to keep."""


class LogConfig(Section):
    every_steps: Steps = 50
    """Steps between flushes of the log. Every step is logged."""


class DetectionConfig(Section):
    output_dir: Text = "runs/detection"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard events, detections.json, the resolved config."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Determines initial weights, order of the images, flips and sampled anchors."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: ScheduleConfig = ScheduleConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    distributed: DistributedConfig = DistributedConfig()

    def misfits(self) -> Iterator[str]:
        if self.model.batchnorm == "frozen" and self.model.init_from is None:
            remedy = "name the weights whose statistics it keeps, or set model.batchnorm=batch to train from scratch"
            yield f"model.batchnorm=frozen requires model.init_from, got null: {remedy}"
        if self.data.short_side > self.data.long_side:
            yield f"data.short_side must be at most data.long_side {self.data.long_side}, got {self.data.short_side}"

    @property
    def has_masks(self) -> bool:
        return self.model.detector == "mask_rcnn"

    def for_package(self, categories: int) -> package.Config:
        """The run as the package's engine, log and checkpoints know it. Casts to bf16 are the detector's own."""
        own = self.model_dump(include={"output_dir", "seed", "log", "distributed"})
        own["model"] = self.model.model_dump(include={"name", "image_size", "switches"}) | {"num_classes": categories}
        own["train"] = self.train.model_dump() | {"precision": "fp32", "zero_stage": 0}
        own["optim"] = self.optim.model_dump(include={"lr", "weight_decay", "clip_grad_norm"})
        own["checkpoint"] = self.checkpoint.model_dump() | {"keep_best": False}
        return package.Config.model_validate(own)


def main() -> None:
    command_parser("examples.detection.config", __doc__).parse_args()
    print(markdown_table(root=DetectionConfig))


if __name__ == "__main__":
    run_command(main)
