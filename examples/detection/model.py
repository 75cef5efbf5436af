"""Build detectors: a backbone of this project, a feature pyramid, and torchvision's RetinaNet or Mask R-CNN on it.

The hyperparameters are those of mmdetection's 1x configs, with which the papers report, where torchvision has another default.
Everything that is drawn in a forward pass is drawn per image, from the image's place in the stream.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from examples.detection.config import DetectionConfig
from pipeline.checkpoint.weights import read_initial_weights
from pipeline.errors import UserError, first_line, install_extra
from pipeline.models import create_model, load_pretrained
from pipeline.models.common.base import VisionModel
from pipeline.step.precision import autocast

ASPECT_RATIOS = (0.5, 1.0, 2.0)
FIRST_STRIDE = {"retinanet": 8, "mask_rcnn": 4}  # of the finest map that the pyramid takes: C3, C2
ANCHOR_SCALE = {"retinanet": 4.0, "mask_rcnn": 8.0}
OCTAVES = (1.0, 2 ** (1 / 3), 2 ** (2 / 3))  # RetinaNet's anchors per level (Lin et al., ICCV 2017, Sec. 4)
BOX_WIDTH = 4  # channels of Mask R-CNN's box head for each of the pyramid: 1024 at 256, as published
PROPOSALS = 1000  # that training passes on to the heads; torchvision passes on 2000


def import_torchvision() -> Any:
    """``torchvision.models.detection``.

    Raises:
        UserError: it is not installed, or its operators were made for another build of PyTorch.
    """
    remedy = install_extra("detection")
    try:
        from torchvision.models import detection
        from torchvision.ops import nms

        nms(torch.zeros(1, 4, device="cpu"), torch.zeros(1, device="cpu"), 0.5)
    except ModuleNotFoundError as error:
        raise UserError(f"detection requires torchvision and pycocotools, got no package {error.name!r}", remedy) from None
    except (ImportError, RuntimeError, OSError) as error:  # NotImplementedError is a RuntimeError
        problem = f"torchvision's operators do not run beside PyTorch {torch.__version__} ({first_line(error)})"
        raise UserError(problem, remedy) from None
    return detection


class Pyramid(nn.Module):
    """A backbone's feature maps and the feature pyramid on them (Lin et al., CVPR 2017).

    Args:
        features: the feature form of a model, whose maps of a stride below ``first_stride`` are not used.
        width: channels of each level.
        more_levels: RetinaNet's P6 and P7, convolutions from the last map; else one level by subsampling.
        precision: "bf16" or "fp32".

    Attributes:
        strides: of each level, the first ``maps`` of which come from a map.
        noise: (B, noise_per_sample) for the next forward pass, see :class:`VisionModel`; None: PyTorch's generator.
    """

    def __init__(self, features: VisionModel, first_stride: int, width: int, more_levels: bool, precision: str) -> None:
        super().__init__()
        from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool, LastLevelP6P7

        self.features, self.precision = features, precision
        self.first = sum(stride < first_stride for stride in features.strides[:-1])
        widths = list(features.widths[self.first :])
        extra = LastLevelP6P7(widths[-1], width) if more_levels else LastLevelMaxPool()
        self.pyramid = FeaturePyramidNetwork(widths, width, extra)
        strides = features.strides[self.first :]
        self.strides = [*strides, *(strides[-1] * 2**level for level in range(1, 3 if more_levels else 2))]
        self.maps, self.out_channels = len(widths), width
        self.noise: Tensor | None = None

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """(B, 3, H, W) -> level -> (B, width, H / stride, W / stride) float32, the finest first."""
        with autocast(images.device, self.precision):
            maps = self.features(images, self.noise)[self.first :]
            levels = self.pyramid(OrderedDict((str(level), each) for level, each in enumerate(maps)))
        return OrderedDict((name, level.float()) for name, level in levels.items())


class Detector(nn.Module):
    """torchvision's RetinaNet or MaskRCNN on a :class:`Pyramid`. ``frozen``: BatchNorm keeps its statistics in training too."""

    def __init__(self, detector: Any, frozen: bool) -> None:
        super().__init__()
        self.detector, self.frozen = detector, frozen
        # Those that train on a sample of what they are given: the region proposal network and the heads.
        parts = [getattr(detector, name) for name in ("rpn", "roi_heads") if hasattr(detector, name)]
        self.samplers = [_sample_per_image(part) for part in parts]

    @property
    def pyramid(self) -> Pyramid:
        return self.detector.backbone

    def train(self, mode: bool = True) -> Detector:
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(
        self,
        images: list[Tensor],
        targets: list[dict[str, Tensor]] | None = None,
        noise: Tensor | None = None,
        seeds: Sequence[int] = (),
    ) -> Any:
        """In training mode the losses of a micro-batch by name, whose sum is minimized, else the detections.

        Args:
            images: B times (3, H, W) in [0, 1]. What follows is for training.
            targets: see :data:`examples.detection.data.Target`.
            noise: (B, noise_per_sample).
            seeds: one for each image, for the sampled anchors and proposals.

        Returns:
            Detections per image, best first: boxes (n, 4) in its pixels, labels (n,), scores (n,), and masks (n, 1, H, W).
        """
        self.pyramid.noise = noise
        for sampler in self.samplers:
            sampler.seeds = list(seeds)
        return self.detector(images, targets)


def build_detector(config: DetectionConfig, categories: int, fresh: bool = True) -> tuple[Detector, list[str]]:
    """The detector with its first weights, by PyTorch's default generator, and sentences for the log.

    Args:
        categories: their number, without the background.
        fresh: no checkpoint follows, so that ``model.init_from`` is read.

    Raises:
        UserError: torchvision does not load, or the backbone's weights cannot be read or do not fit.
    """
    detection = import_torchvision()
    model, data = config.model, config.data
    features, notes = build_features(config, fresh)
    retinanet = model.detector == "retinanet"
    pyramid = Pyramid(features, FIRST_STRIDE[model.detector], model.pyramid_width, retinanet, config.train.precision)
    scale = model.anchor_scale or ANCHOR_SCALE[model.detector]
    octaves = OCTAVES if retinanet else (1.0,)
    anchors = detection.anchor_utils.AnchorGenerator(
        tuple(tuple(int(scale * stride * octave) for octave in octaves) for stride in pyramid.strides),
        (ASPECT_RATIOS,) * len(pyramid.strides),
    )
    sizes = {"min_size": data.short_side, "max_size": data.long_side}
    common = {**sizes, "image_mean": list(data.mean), "image_std": list(data.std)}
    if retinanet:
        limits = {"score_thresh": config.eval.score_threshold, "detections_per_img": config.eval.detections}
        detector = detection.RetinaNet(pyramid, categories, anchor_generator=anchors, **limits, **common)
    else:
        detector = _mask_rcnn(detection, pyramid, categories, anchors, config, common)
    return Detector(detector, model.batchnorm == "frozen"), notes


def _mask_rcnn(detection: Any, pyramid: Pyramid, categories: int, anchors: Any, config: DetectionConfig, common: dict) -> Any:
    from torchvision.ops import MultiScaleRoIAlign

    maps = [str(level) for level in range(pyramid.maps)]
    pools = {  # 7 and 14: sides of the pooled maps (He et al., ICCV 2017, Sec. 3); 2 samples per bin and axis: torchvision's
        "box_roi_pool": MultiScaleRoIAlign(maps, output_size=7, sampling_ratio=2),
        "mask_roi_pool": MultiScaleRoIAlign(maps, output_size=14, sampling_ratio=2),
    }
    width, labels = pyramid.out_channels, categories + 1  # label 0 is the background
    heads = {  # torchvision's, whose widths are fixed, in the widths of the pyramid; made in its order, so drawn alike
        "mask_head": detection.mask_rcnn.MaskRCNNHeads(width, (width,) * 4, 1),
        "mask_predictor": detection.mask_rcnn.MaskRCNNPredictor(width, width, labels),
        "rpn_head": detection.rpn.RPNHead(width, anchors.num_anchors_per_location()[0]),
        "box_head": detection.faster_rcnn.TwoMLPHead(width * 7**2, BOX_WIDTH * width),
        "box_predictor": detection.faster_rcnn.FastRCNNPredictor(BOX_WIDTH * width, labels),
    }
    return detection.MaskRCNN(
        pyramid,
        rpn_anchor_generator=anchors,
        rpn_post_nms_top_n_train=PROPOSALS,
        box_batch_size_per_image=config.model.box_samples,
        box_score_thresh=config.eval.score_threshold,
        box_detections_per_img=config.eval.detections,
        **pools,
        **heads,
        **common,
    )


def build_features(config: DetectionConfig, fresh: bool) -> tuple[VisionModel, list[str]]:
    """The backbone, and sentences for the log. Arguments and errors as for :func:`build_detector`; needs no torchvision."""
    its = config.model
    features = create_model(its.name, image_size=its.image_size, drop_path=its.drop_path, switches=its.switches, features=True)
    if not its.init_from or not fresh:
        return features, []
    initial = read_initial_weights(Path(its.init_from), key="model.init_from")
    said = load_pretrained(features, initial.weights, f"model.init_from {its.init_from}")
    return features, [f"model.init_from: {sentence}" for sentence in (f"{initial.what} of {its.init_from}", *said)]


def _sample_per_image(part: Any) -> Any:
    """Replace the part's sampler by one that draws for each image from a seed of its own."""
    from torchvision.models.detection._utils import BalancedPositiveNegativeSampler

    class PerImage(BalancedPositiveNegativeSampler):
        seeds: Sequence[int] = ()

        def __call__(self, matched_idxs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            drawn = []
            for seed, matched in zip(self.seeds, matched_idxs, strict=True):
                torch.manual_seed(seed)  # the only use of PyTorch's generator in a run
                drawn.append(super().__call__([matched]))
            return [positive for (positive,), _ in drawn], [negative for _, (negative,) in drawn]

    part.fg_bg_sampler = PerImage(part.fg_bg_sampler.batch_size_per_image, part.fg_bg_sampler.positive_fraction)
    return part.fg_bg_sampler
