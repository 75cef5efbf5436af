"""Build detectors: a backbone of this project, a feature pyramid, and torchvision's RetinaNet or Mask R-CNN on it.

The hyperparameters are those of mmdetection's 1x configs, with which the papers report, where torchvision has another default.
Everything that is drawn in a forward pass is drawn per image, from the image's place in the stream.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from examples.detection.config import DetectionConfig
from examples.detection.data import Batch
from pipeline.checkpoint.weights import read_initial_weights
from pipeline.errors import missing_extra
from pipeline.metrics import record
from pipeline.models import create_model, load_pretrained
from pipeline.models.common.base import VisionModel
from pipeline.step.precision import autocast

ASPECT_RATIOS = (0.5, 1.0, 2.0)
OCTAVES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))  # RetinaNet's anchors per level (Lin et al., ICCV 2017, Sec. 4)
# By detector: stride of the finest map that the pyramid takes, C3 or C2; sides of the square anchors in strides of their level.
FIRST_STRIDE = {"retinanet": 8, "mask_rcnn": 4}
ANCHORS = {"retinanet": [4.0 * octave for octave in OCTAVES], "mask_rcnn": [8.0]}


def import_torchvision() -> Any:
    """``torchvision.models.detection``. Raises UserError: it is not installed, or was made for another build of PyTorch."""
    try:
        from torchvision.models import detection
        from torchvision.ops import nms

        nms(torch.zeros(1, 4, device="cpu"), torch.zeros(1, device="cpu"), 0.5)
    except (ImportError, RuntimeError, OSError) as error:  # NotImplementedError is a RuntimeError
        raise missing_extra("detection", f"torchvision for PyTorch {torch.__version__}", "detection", "", error) from None
    return detection


class Pyramid(nn.Module):
    """A backbone's feature maps and the feature pyramid on them (Lin et al., CVPR 2017), as torchvision takes a backbone: the
    ``strides`` of the levels; ``noise``, (B, noise_per_sample), is for the next forward pass."""

    def __init__(self, features: VisionModel, config: DetectionConfig) -> None:
        super().__init__()
        from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool, LastLevelP6P7

        self.features, self.precision, self.out_channels = features, config.train.precision, config.model.pyramid_width
        self.first = sum(stride < FIRST_STRIDE[config.model.detector] for stride in features.strides[:-1])
        widths, strides = list(features.widths[self.first :]), features.strides[self.first :]
        # Mask R-CNN has one more level, which is subsampled; RetinaNet's P6 and P7 are convolutions.
        more = LastLevelMaxPool() if config.has_masks else LastLevelP6P7(widths[-1], self.out_channels)
        self.pyramid = FeaturePyramidNetwork(widths, self.out_channels, more)
        self.strides = [*strides, *(strides[-1] * factor for factor in ([2] if config.has_masks else [2, 4]))]
        self.noise: Tensor | None = None

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """(B, 3, H, W) -> level -> (B, width, H / stride, W / stride) float32, the finest first."""
        with autocast(images.device, self.precision):
            maps = self.features(images, self.noise)[self.first :]
            levels = self.pyramid(OrderedDict((str(level), each) for level, each in enumerate(maps)))
        return OrderedDict((name, level.float()) for name, level in levels.items())


class SeededSampler:
    """A sampler of torchvision, which decides what counts in a loss, with PyTorch's generator set to a seed of each image."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.seeds = sampler, list[int]()

    def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        drawn = []
        for seed, matched in zip(self.seeds, matched_idxs, strict=True):
            torch.manual_seed(seed)  # the only use of PyTorch's generator in a run
            drawn.append(self.sampler([matched]))
        return [positive for (positive,), _ in drawn], [negative for _, (negative,) in drawn]


class Detector(nn.Module):
    """torchvision's RetinaNet or MaskRCNN on a :class:`Pyramid`, with what the package's training step asks a model."""

    draws_from_generator = False

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector, features = detector, detector.backbone.features
        self.noise_per_sample, self.frozen_norms = features.noise_per_sample, features.frozen_norms
        self.samplers = []
        for name in ("rpn", "roi_heads"):  # of Mask R-CNN, which train on a sample of what they are given
            if part := getattr(detector, name, None):
                part.fg_bg_sampler = SeededSampler(part.fg_bg_sampler)
                self.samplers.append(part.fg_bg_sampler)

    def forward(self, batch: Batch, noise: Tensor | None = None) -> Any:
        """In training mode the losses by name; ``noise`` is (B, noise_per_sample). Else the detections per image, best first:
        boxes (n, 4) in its pixels, labels (n,), scores (n,), and masks (n, 1, H, W)."""
        self.detector.backbone.noise = noise
        for sampler in self.samplers:
            sampler.seeds = batch.request.torch_seed.tolist() if batch.request else []
        return self.detector(batch.pixels, batch.targets)

    def total(self, losses: dict[str, Tensor], batch: Batch) -> Tensor:
        """The objective: the sum of the losses, (), which are recorded."""
        for name, value in losses.items():
            record(name, value)
        return torch.stack(list(losses.values())).sum()


def build_detector(config: DetectionConfig, categories: int, fresh: bool = True) -> tuple[Detector, list[str]]:
    """The detector for so many ``categories``, without the background, and sentences for the log. Its weights are drawn by
    PyTorch's generator; a ``fresh`` one, which no checkpoint follows, has the backbone of ``model.init_from``. Raises UserError:
    torchvision does not load, or the backbone's weights cannot be read or do not fit."""
    detection = import_torchvision()
    model, data, width = config.model, config.data, config.model.pyramid_width
    features, notes = build_features(config, fresh)
    pyramid = Pyramid(features, config)
    sizes = [tuple(int(side * stride) for side in ANCHORS[model.detector]) for stride in pyramid.strides]
    anchors = detection.anchor_utils.AnchorGenerator(sizes, (ASPECT_RATIOS,) * len(sizes))
    sides = {"min_size": data.short_side, "max_size": data.long_side}  # mean and deviation are ImageNet's by default
    if not config.has_masks:
        limit = {"detections_per_img": 100}  # as many as COCO's metrics use: Mask R-CNN's default
        return Detector(detection.RetinaNet(pyramid, categories, anchor_generator=anchors, **limit, **sides)), notes
    labels = categories + 1  # label 0 is the background
    built = detection.MaskRCNN(
        pyramid,
        rpn_anchor_generator=anchors,
        rpn_post_nms_top_n_train=1000,  # proposals that the heads get in training; torchvision's default is 2000
        box_batch_size_per_image=model.box_samples,
        # torchvision's heads have fixed widths; these have the pyramid's, the box head four times as many: 1024, as published.
        mask_head=detection.mask_rcnn.MaskRCNNHeads(width, (width,) * 4, 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(width, width, labels),
        box_head=detection.faster_rcnn.TwoMLPHead(width * 7**2, 4 * width),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(4 * width, labels),
        **sides,
    )
    return Detector(built), notes


def build_features(config: DetectionConfig, fresh: bool) -> tuple[VisionModel, list[str]]:
    """The backbone of :func:`build_detector`, and sentences for the log; needs no torchvision."""
    its = config.model
    features = create_model(its.name, image_size=its.image_size, drop_path=its.drop_path, switches=its.switches, features=True)
    if its.batchnorm == "frozen":
        features.frozen_norms = [module for module in features.modules() if isinstance(module, _BatchNorm)]
    if not its.init_from or not fresh:
        return features, []
    initial = read_initial_weights(Path(its.init_from), key="model.init_from")
    said = load_pretrained(features, initial.weights, f"model.init_from {its.init_from}")
    return features, [f"model.init_from: {sentence}" for sentence in (f"{initial.what} of {its.init_from}", *said)]
