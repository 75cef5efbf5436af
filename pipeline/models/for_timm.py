"""Register this project's models with timm, so that ``timm.create_model`` makes and loads them::

    import timm
    import pipeline.models.for_timm

    timm.create_model("pervit_t", num_classes=10, img_size=64, drop_path_rate=0.1)
    timm.create_model("local-dir:FOLDER", pretrained=True)  # what `pervit export --format timm` wrote

A model is this project's own, with the attributes and methods that users of timm expect (:class:`TimmModel`). ``features_only=True``
gives its feature maps. The ablation switches are an argument, ``switches``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.lazy import import_library
from pipeline.models import as_features, create_model, list_models, model_entry
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import init_linear
from pipeline.models.common.vit import ClassTokenModel
from pipeline.models.weights.reference_names import fitting_names

import_library("timm", "pipeline.models.for_timm")
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model  # noqa: E402
from timm.models._features import FeatureInfo  # noqa: E402

# Family -> its first convolution, and the side of its last map at its own size of images.
_STEMS = {
    "pervit": ("stem.layers.0.0", 14),
    "convit": ("patch_embedding", 14),
    "deit": ("patch_embedding", 14),
    "gmlp": ("stem", 14),
    "lsat": ("embedding.projections.0", 4),
    "posmlp": ("stem.convolutions.0", 7),
}


class NoHead(nn.Identity):
    """Instead of a classifier: features (B, in_features) as they are."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features


class TimmModel(VisionModel):
    """What timm's models have beside a forward pass. Mixed into a model's class by :func:`for_timm`."""

    head: nn.Linear | NoHead
    num_classes: int  # 0: no classifier
    side: int  # of the images that it was made for
    feature_dim = -1  # of the channels in what forward_features gives
    output_fmt = "NHWC"  # of the same, where it has rows and columns
    in_chans = 3
    unpooled = False  # forward is forward_features

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Any:
        """See the base class; without pooling and classifier, ``forward_features``."""
        return self.forward_features(images) if self.unpooled else super().forward(images, noise)

    @property
    def num_features(self) -> int:
        return self.head.in_features

    head_hidden_size = embed_dim = num_features

    @property
    def global_pool(self) -> str:
        return "" if self.unpooled else "token" if isinstance(self, ClassTokenModel) else "avg"

    @property
    def num_prefix_tokens(self) -> int:
        return 1 if isinstance(self, ClassTokenModel) else 0

    def forward_features(self, images: Tensor) -> Tensor:
        """The last block's normalized result, not pooled: (B, N + 1, width), class token first, of ConViT and DeiT;
        (B, rows, columns, width) of PosMLP and LSAT; else (B, N, width)."""
        if isinstance(self, ClassTokenModel):
            return self.norm(self.tokens(images, None))
        seen: list[Tensor] = []
        with self.norm.register_forward_hook(lambda module, inputs, output: seen.append(output)):
            self.class_scores(images)
        return _grid(seen[-1]) if hasattr(self, "levels") or hasattr(self, "stages") else seen[-1].flatten(1, -2)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """timm's method: what :meth:`forward_features` returns, and with it the result of each block, in a model with stages of the last
        block of each, as maps (B, width, rows, columns), or (B, rows * columns, width) for ``output_fmt="NLC"``; never normalized."""
        if norm:
            raise UserError("norm is True, but the results of the blocks have no norms of their own", "leave it out")
        found: list[Tensor] = []
        with ExitStack() as hooks:
            for name in self._taken():
                hooks.enter_context(self.get_submodule(name).register_forward_hook(lambda *call: found.append(call[2])))
            features = self.forward_features(x)
        chosen = range(len(found)) if indices is None else range(-indices, 0) if isinstance(indices, int) else indices
        maps = [_grid(found[index]) for index in chosen]  # (B, rows, columns, width) each
        maps = [each.flatten(1, 2) if output_fmt == "NLC" else each.permute(0, 3, 1, 2) for each in maps]
        return maps if intermediates_only else (features, maps)

    def _taken(self) -> list[str]:
        """Names of the blocks that :meth:`forward_intermediates` looks at."""
        return list({name.rpartition("blocks.")[0] or name: name.rstrip(".") for name in self._block_prefixes()}.values())

    @property
    def feature_info(self) -> list[dict[str, Any]]:
        """Of each map of :meth:`forward_intermediates`, by a forward pass of a black image."""
        side, trained = self.side, self.training
        with torch.no_grad():
            black = torch.zeros(1, 3, side, side, device=self.norm.weight.device)
            maps = self.eval().forward_intermediates(black, intermediates_only=True)
        self.train(trained)
        sizes = [{"num_chs": each.shape[1], "reduction": side // each.shape[2]} for each in maps]
        return [{**size, "module": name} for size, name in zip(sizes, self._taken())]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify: what :meth:`forward_features` returns -> (B, num_classes), or with ``pre_logits`` (B, width)."""
        pooled = x[:, 0] if self.num_prefix_tokens else x.flatten(1, -2).mean(dim=1)  # (B, width)
        return pooled if pre_logits else self.head(pooled)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh classifier for ``num_classes``; 0: none, and with ``global_pool=""`` no pooling. Another way of pooling is a ``UserError``."""
        self.unpooled = global_pool == "" and not num_classes
        if global_pool not in (None, self.global_pool):
            raise UserError(f"global_pool is {global_pool!r}, but this model has {self.global_pool!r} alone", "leave it out")
        width, like = self.num_features, self.norm.weight
        self.num_classes = num_classes
        self.head = nn.Linear(width, num_classes, device=like.device, dtype=like.dtype) if num_classes else NoHead(width)
        init_linear(self.head)
        self.head.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.activation_checkpointing = enable

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters for timm's layer decay: what comes before the blocks, blocks (or stages), what comes after."""
        stem = r"^(?:stem|embedding|patch_embedding|class_token|position_(?:embedding|vectors)|absolute_position|distance_scales|projection)"
        last = [(r"^norm", (99999,))]
        if coarse:
            parts = r"^(?:blocks|position_generators|stages|levels|downsamplings)\.(\d+)"
            return {"stem": stem, "blocks": [(parts, None), *last]}
        blocks = [
            (r"^(?:blocks|position_generators)\.(\d+)", None),
            (r"^(?:stages|levels)\.(\d+)\.blocks\.(\d+)", None),
            (r"^(?:stages|levels)\.(\d+)\.(?!blocks)", (0,)),  # what comes before a stage's first block
            (r"^downsamplings\.(\d+)", (999,)),
        ]
        return {"stem": stem, "blocks": blocks + last}


class FeatureMaps(nn.Module):
    """A classifier as timm's ``features_only=True`` gives it: images (B, 3, H, W) -> list of maps, of ``out_indices`` or all."""

    def __init__(self, model: Any, out_indices: Sequence[int] | None) -> None:
        super().__init__()
        self.default_cfg = self.pretrained_cfg = model.pretrained_cfg
        self.model = as_features(model)
        levels = range(len(model.widths))
        self.out_indices = tuple(levels if out_indices is None else (levels[index] for index in out_indices))
        info = [{"num_chs": model.widths[i], "reduction": model.strides[i], "module": f"map.{i}"} for i in levels]
        self.feature_info = FeatureInfo(info, self.out_indices)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.model.feature_maps(images)
        return [maps[index] for index in self.out_indices]


def _grid(x: Tensor) -> Tensor:
    """Tokens in any layout (B, ..., width), a class token before them or not, as their square (B, rows, columns, width)."""
    tokens = x.flatten(1, -2)  # (B, N, width)
    side = math.isqrt(tokens.shape[1])
    return tokens[:, tokens.shape[1] - side * side :].unflatten(1, (side, side))


def for_timm(model: VisionModel) -> VisionModel:
    """Give a model timm's interface, in place. Parameters and their names stay."""
    if not isinstance(model, TimmModel):
        model.__class__ = _with_interface(type(model))  # type: ignore[arg-type]  # a class is hashable
        model.num_classes = model.get_submodule("head").out_features
    return model


@cache
def _with_interface(family: type[VisionModel]) -> type[VisionModel]:
    return type(family.__name__, (TimmModel, family), {"__module__": __name__, "__doc__": family.__doc__})


def _make(
    name: str,
    num_classes: int = 1000,
    img_size: int | Sequence[int] | None = None,
    in_chans: int = 3,
    global_pool: str | None = None,
    drop_rate: float = 0.0,
    drop_path_rate: float = 0.0,
    switches: Mapping[str, Any] = MappingProxyType({}),
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> VisionModel:
    """A model for timm: its arguments in this project's terms."""
    sides = {img_size or model_entry(name).image_size} if not isinstance(img_size, Sequence) else set(img_size)
    if len(sides) != 1 or in_chans != 3 or drop_rate:
        problem = f"in_chans={in_chans}" if in_chans != 3 else f"drop_rate={drop_rate}"
        problem = problem if len(sides) == 1 else f"img_size={img_size}"
        takes = "takes square images of 3 channels and has no such dropout"
        raise UserError(f"{name} of pervit-pipeline has {problem}, but {takes}", "leave it out")
    (side,) = sides
    with nullcontext() if device is None else torch.device(device):
        model = for_timm(create_model(name, max(num_classes, 1), side, drop_path_rate, switches=switches).to(dtype=dtype))
    assert isinstance(model, TimmModel)
    model.side = side
    if global_pool is not None or num_classes == 0:
        model.reset_classifier(num_classes, global_pool)
    return model


def _our_names(weights: Mapping[str, Tensor], model: VisionModel) -> Mapping[str, Tensor]:
    """Weights under our names, whether they have these or the authors'."""
    names, tables = fitting_names(model, weights.keys()), model.reference_tables().keys()
    return {names.get(name, name): value for name, value in weights.items() if name not in tables}


def _entrypoint(name: str) -> Callable[..., nn.Module]:
    def build(pretrained: bool = False, **arguments: Any) -> nn.Module:
        features, indices = arguments.pop("features_only", False), arguments.pop("out_indices", None)
        arguments.pop("feature_cls", None)  # however timm would find the maps of its own models
        options = {"pretrained_filter_fn": _our_names, **arguments}
        model = build_model_with_cfg(lambda **given: _make(name, **given), name, pretrained, **options)
        return FeatureMaps(model, indices) if features else model

    build.__name__ = build.__qualname__ = name
    build.__module__ = __name__
    build.__doc__ = model_entry(name).description
    return build


def _config(name: str) -> dict[str, Any]:
    """timm's ``pretrained_cfg`` of a model without weights."""
    entry = model_entry(name)
    first_conv, side = _STEMS[name.partition("_")[0].rstrip("3")]
    stem = {"first_conv": first_conv, "pool_size": (side, side)}
    shape = {"input_size": (3, entry.image_size, entry.image_size), "fixed_input_size": True, "num_classes": entry.num_classes}
    return shape | stem | {"classifier": "head", "license": "apache-2.0"}


default_cfgs = generate_default_cfgs({name: _config(name) for name in list_models()})
for _name in list_models():
    globals()[_name] = register_model(_entrypoint(_name))
