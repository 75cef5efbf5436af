"""Define the config keys of the data and its augmentation; see ``sections``."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.config.values import MAX_BATCH, MAX_SIDE, Aspect, Count, Deviation, Mean, PlainValues, Section, Share, Text
from pipeline.errors import shown


class DataConfig(Section):
    path: Text = "data/imagenet"
    """Folder that holds the shard sets (train and val), or a URL: s3://BUCKET/PREFIX, gs://, az:// or https://."""
    mix: dict[Text, Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]] = {}
    """Further shard sets to train on: folder -> how often an epoch shows each of its images, on average (0.5: every other epoch). Classes are those of data.path, matched by name."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Decoder threads per rank; null: the node's CPU cores divided by its ranks."""
    decode: Literal["auto", "gpu", "cpu"] = "auto"
    """What decodes and resizes images for a GPU: gpu, or cpu, which leaves the GPU to the training. auto: training measures both in its first batches and keeps the faster, evaluation takes the GPU. Without a GPU, auto is cpu; a GPU whose decoder fails in a trial is not used."""
    prefetch: Annotated[int, Field(ge=1, le=1024)] = 2
    """Decoded batches to prefetch."""
    read_ahead: Annotated[int, Field(ge=1, le=1024)] = 4
    """Batches whose files are read ahead; takes memory for that many times micro_batch_size encoded images."""
    cache: Text | None = None
    """Folder on a disk of the node that keeps copies of whole shards, for all processes of the node; in an existing folder. null: none."""
    cache_gib: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """Size of all shards in that folder, GiB; null: up to 95 % of its disk."""
    order: Literal["full", "block"] = "full"
    """full: every epoch is a permutation of all samples. block: samples that are adjacent on disk stay close in time, for storage with slow random reads."""
    block_size: Annotated[int, Field(ge=1, le=2**24)] = 256
    """Consecutive samples of a shard that are read as one block (order: block)."""
    window_blocks: Annotated[int, Field(ge=1, le=2**24)] = 64
    """Blocks whose samples are shuffled together (order: block); 64 x 256 samples are about 2 GB of page cache."""
    max_bad_samples: Count = 100
    """Unreadable or damaged images to tolerate: training substitutes a neighbour, evaluation skips them; one more stops the run."""
    train_crop: Literal["random_resized", "simple", "padded"] = "random_resized"
    """random_resized: a random part of the image (crop_scale, crop_ratio), resized. simple: the short side resized to image_size, 4 pixels mirrored at each border, a random square of it (DeiT III). padded: the same with 4 black pixels at each border, as is usual on CIFAR; images of image_size are not resampled."""
    size_schedule: list[tuple[Count, Annotated[int, Field(ge=5, le=MAX_SIDE)]]] = []
    """Progressive resolution: pairs of an epoch, 0 for the first, and the side of training images from it on, in pixels, such as [[0, 128], [30, 176], [60, 224]]. Before the first pair and in evaluations the side is model.image_size, which is the largest. For models that take images of any size."""
    crop_scale: tuple[Share, Share] = (0.08, 1.0)
    """Area of the random crop as a fraction of the image."""
    crop_ratio: tuple[Aspect, Aspect] = (3 / 4, 4 / 3)
    """Aspect ratio (width / height) of the random crop."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    train_interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    """Filter of the crop's resize and of RandAugment's geometric operations. random: one of the two for each of them, as in timm. Evaluation is bicubic."""
    eval_crop: Annotated[float, Field(ge=0.1, le=1)] = 0.875
    """Evaluation resizes the short side to image_size / eval_crop, rounded down (224 / 0.875 = 256), then crops the centre."""
    mean: tuple[Mean, Mean, Mean] = (0.485, 0.456, 0.406)
    """Normalization, per RGB channel, of pixels in [0, 1]."""
    std: tuple[Deviation, Deviation, Deviation] = (0.229, 0.224, 0.225)
    """Normalization, per RGB channel, of pixels in [0, 1]."""

    @field_validator("mix", mode="before")
    @classmethod
    def _weights_are_numbers(cls, mix: Any) -> Any:
        for folder, weight in mix.items() if isinstance(mix, dict) else ():
            if isinstance(weight, bool):  # which pydantic takes for 0 or 1
                raise ValueError(f"must have a number as the weight of {folder!a:.80}, got {shown(weight)}")
        return mix

    def side_at(self, epoch: int, image_size: int) -> int:
        """The side of training images in an epoch, pixels; ``image_size`` is the model's."""
        return next((side for begin, side in reversed(self.size_schedule) if begin <= epoch), image_size)

    def area_until(self, epoch: float, image_size: int) -> float:
        """The area of training images, pixels, summed over epochs until this one: what the time of training grows with."""
        parts = [(0, image_size), *self.size_schedule]
        ends = [begin for begin, _ in self.size_schedule] + [epoch]
        return sum(max(0.0, min(epoch, end) - begin) * side**2 for (begin, side), end in zip(parts, ends))

    def seconds_left(self, seconds: float, epochs: tuple[float, float, float], image_size: int) -> float:
        """How long training takes from the second of three epochs to the third, if it took ``seconds`` from the first to the second."""
        begun, done, whole = (self.area_until(epoch, image_size) for epoch in epochs)
        return seconds * (whole - done) / (done - begun)

    def misfits(self) -> Iterator[str]:
        epochs = [epoch for epoch, _ in self.size_schedule]
        if epochs != sorted(set(epochs)):
            yield f"data.size_schedule must have each epoch once, in ascending order, got {epochs}"
        if self.path in self.mix:
            yield f"data.mix must not hold data.path, which has weight 1, got {self.path!a:.80}: remove it from data.mix"
        for name in ("crop_scale", "crop_ratio"):
            (low, high), default = getattr(self, name), type(self).model_fields[name].default
            if low > high:
                yield f"data.{name} must go from low to high, got [{low}, {high}]"
            if self.train_crop != "random_resized" and (low, high) != default:
                yield f"data.{name} must be left at its default {list(default)} with data.train_crop={self.train_crop}, got {[low, high]}"
        if self.cache and "://" in self.cache:
            yield f"data.cache must be a folder on a disk of the node, got {shown(self.cache)}"
        if self.cache_gib is not None and self.cache is None:
            yield f"data.cache_gib={self.cache_gib:g} requires data.cache, got null: set it to a folder on a disk of the node"


class AugmentConfig(Section):
    """Augmentation after crop and flip. Off by default; the recipes in configs/ turn it on."""

    rand_augment_ops: Annotated[int, Field(ge=0, le=8)] = 0
    """RandAugment operations per image (the papers' rand-m9-mstd0.5-inc1 has 2); 0: none."""
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=10)] = 9
    """RandAugment: magnitude, 0 to 10."""
    rand_augment_std: Annotated[float, Field(ge=0, le=10)] = 0.5
    """RandAugment: standard deviation of the magnitude."""
    three_augment: bool = False
    """3-Augment (DeiT III): one of grayscale, solarization and Gaussian blur for each image."""
    color_jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Colour jitter: brightness, contrast and saturation are multiplied by factors between 1 - this and 1 + this (DeiT III: 0.3); 0: off."""
    erasing: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Random erasing: probability that a rectangle is replaced by noise."""
    mixup: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Mixup: alpha of the Beta distribution of the mixing weight; 0: off."""
    cutmix: Annotated[float, Field(ge=0, le=2)] = 0.0
    """CutMix: alpha of the Beta distribution of the area that is kept; 0: off."""
    mix_switch: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of CutMix when both Mixup and CutMix are on."""
    mix_group: Annotated[int, Field(ge=2, le=MAX_BATCH)] = 8
    """Consecutive images that share one mixing weight and are mixed with each other; must divide micro_batch_size."""
    repeats: Annotated[int, Field(ge=1, le=64)] = 1
    """Repeated augmentation: views of each image, spread over the global batch; an epoch then covers 1/repeats of the images."""

    imported: dict[Text, PlainValues] = {}
    """Augmentations of your own, `{module:Class: {SETTING: VALUE}}`: subclasses of `pipeline.augment.PixelAugmentation` or `BatchAugmentation` in a file in the current folder or on PYTHONPATH."""

    def misfits(self) -> Iterator[str]:
        for name in ("mixup", "cutmix"):
            if 0 < (alpha := getattr(self, name)) < 0.01:
                yield f"augment.{name} must be 0 or at least 0.01, got {alpha}"
        for name in ("three_augment", "color_jitter"):
            if self.rand_augment_ops and (given := getattr(self, name)):
                yield (
                    f"augment.{name} requires augment.rand_augment_ops=0, got {self.rand_augment_ops} with augment.{name}="
                    f"{shown(given)}: set augment.rand_augment_ops=0, or augment.{name}={'false' if given is True else 0}"
                )
        if self.mixes and self.mix_group < 2 * self.repeats:
            yield f"augment.mix_group must be at least 2 x augment.repeats = {2 * self.repeats}, got {self.mix_group}"

    @property
    def mixes(self) -> bool:
        """Whether Mixup or CutMix is on."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def unit(self) -> int:
        """Images that stay together on one rank: micro-batches are multiples of this."""
        return self.mix_group if self.mixes else 1
