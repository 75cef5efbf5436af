"""Define the base class of all models: the interface that training, evaluation and checkpoints rely on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from pipeline.config import Section
from pipeline.errors import UserError, first_few
from pipeline.models.common.layers import PATCH

AnyModel = TypeVar("AnyModel", bound="VisionModel")


class Switches(Section):
    """Base of a family's ablation switches (``model.switches`` in a config). The defaults are the paper's model."""


class ModelOptions(NamedTuple):
    """Arguments of every family's model, beside its layout and switches."""

    num_classes: int = 1000  # outputs of the classifier
    image_size: int = 224  # side of the square input in pixels
    drop_path: float = 0.0  # stochastic depth rate, of the last block where rates grow with the depth
    activation_checkpointing: bool = False  # recompute each block in the backward pass


class VisionModel(nn.Module):
    """Base of all families. ``forward(images, noise=None)`` takes (B, 3, H, W) and returns a subclass's ``class_scores``,
    (B, num_classes), or, after :func:`as_features`, its ``feature_maps``.

    Args:
        drop_path_rates: probability of dropping each residual branch, in order of execution.
        activation_checkpointing: :meth:`run_block` recomputes activations in the backward pass.

    Attributes:
        strides, widths: pixels per cell and channels of each feature map. Empty in a classifier.
        reference_names: (authors' name, our name) pairs, used in both directions. The first match applies; a name without a
            match is the same on both sides. ``*`` matches a number, a trailing dot makes the name a prefix.
        reference_switches: switches that do not affect the authors' parameter names: they change shapes only, or no parameter.
        head_names: prefixes of the classifier's parameter names; fine-tuning on other classes reinitializes these.
        patch: side of a patch in pixels, of the models with one grid of patches.
        leading_tokens: tokens without a grid position (class token) at the start of the position embeddings.
        draws_from_generator: a training step draws from PyTorch's generator besides ``noise``; no model of ours does.
        image_format: how the convolution that a forward pass begins with wants its images laid out; None: it begins otherwise, and
            may compute in fp32 before.
        groups_phi: compute Φp of all layers as one network (:mod:`pipeline.models.pervit.phi_model`); None: but on a CPU.
        frozen_norms: BatchNorms that :meth:`freeze` has frozen.
        generator_seed: what the generator starts from in the next forward pass, for a model that draws from it; None: it goes on.
    """

    strides: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    reference_names: tuple[tuple[str, str], ...] = ()
    reference_switches: frozenset[str] = frozenset()
    head_names: tuple[str, ...] = ("head.",)
    leading_tokens: int = 0
    patch: int = PATCH
    draws_from_generator: bool = False
    generator_seed: int | None = None
    image_format: torch.memory_format | None = None
    groups_phi: bool | None = None
    frozen_norms: Sequence[nn.Module] = ()
    drop_path_rates: Tensor  # (branches,), a buffer
    norm: nn.LayerNorm  # of the last feature map; every family has it
    output_norms: nn.ModuleList  # of the maps before the last, in the feature form only

    def __init__(self, drop_path_rates: Sequence[float], activation_checkpointing: bool, switches: Switches) -> None:
        super().__init__()
        self.switches = switches
        self.activation_checkpointing = activation_checkpointing
        rates = torch.tensor(drop_path_rates, dtype=torch.get_default_dtype())
        self.register_buffer("drop_path_rates", rates, persistent=False)  # (branches,)
        self._drops = any(rate > 0 for rate in drop_path_rates)

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Class scores, (B, num_classes).

        Args:
            images: (B, 3, H, W) of a size that the model takes; UserError for another.
            noise: (B, noise_per_sample) uniform numbers in [0, 1) for stochastic depth and dropout; None: drawn from PyTorch's
                generator. The training loop passes numbers that do not depend on the world size. Unused in eval mode.
        """
        raise NotImplementedError

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """(B, 3, H, W) -> (B, widths[i], H / strides[i], W / strides[i]) for each i, sides rounded up; UserError unless they fit."""
        raise NotImplementedError

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(strides, widths) of the feature maps; by default one, of the patches."""
        return (self.patch,), tuple(self.norm.normalized_shape)

    def normed_map(self, x: Tensor, level: int) -> Tensor:
        """LayerNorm of map ``level``: (B, rows, columns, width) -> (B, width, rows, columns), in channels_last layout."""
        norm = self.norm if level == len(self.widths) - 1 else self.output_norms[level]
        return norm(x).permute(0, 3, 1, 2)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Any:  # like the call of any nn.Module
        """``feature_maps`` in the feature form, otherwise ``class_scores``."""
        return self.feature_maps(images, noise) if self.strides else self.class_scores(images, noise)

    def freeze(self, what: str | Sequence[str]) -> None:
        """Let parameters learn no more: ``train.freeze`` of the config. BatchNorm among them normalizes by its running
        statistics from now on, in training too. Raises UserError: there are none of a name, or none are left."""

        def fits(name: str, pattern: str) -> bool:
            plain = name.removeprefix("net.")  # as others' code calls it
            return any(fnmatchcase(each, form) for each in (name, plain) for form in (pattern, f"{pattern}.*"))

        def frozen(name: str) -> bool:
            return not name.startswith(self.head_names) if isinstance(what, str) else any(fits(name, each) for each in what)

        parameters = dict(self.named_parameters())
        for pattern in () if isinstance(what, str) else what:
            if not any(fits(name, pattern) for name in parameters):
                remedy = f"its parameters are {first_few(list(parameters))}"
                raise UserError(f"train.freeze must name parameters or modules of the model, got {pattern!r}", remedy)
        for name, parameter in parameters.items():
            parameter.requires_grad_(parameter.requires_grad and not frozen(name))
        if not any(parameter.requires_grad for parameter in parameters.values()):
            raise UserError(f"train.freeze={what} leaves no parameter that learns", "freeze fewer")
        norms = [(name, module) for name, module in self.named_modules() if isinstance(module, _BatchNorm)]
        self.frozen_norms = [norm for name, norm in norms if frozen(f"{name}.weight")]
        self.train(self.training)

    def train(self: AnyModel, mode: bool = True) -> AnyModel:
        super().train(mode)
        for norm in self.frozen_norms:
            norm.eval()
        return self

    @property
    def noise_per_sample(self) -> int:
        """Uniform numbers that a training step needs per image: one per residual branch, 0 without stochastic depth."""
        return self.drop_path_rates.numel() if self._drops else 0

    @property
    def pooled_width(self) -> int:
        """Inputs of the classifier."""
        return int(self.get_submodule("head").in_features)  # type: ignore[arg-type]  # a Linear in all families

    def pooled(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, pooled_width): what the classifier sees."""
        seen: list[Tensor] = []
        with self.get_submodule("head").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            self(images)
        return seen[0]

    @property
    def has_phi(self) -> bool:
        """Whether the model has PerViT's position-based attention Φp, which is computed once per forward pass for all images."""
        return any(True for _ in self.phi_parameters())

    def phi_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of Φp in all layers."""
        return iter(())

    def log_phi(self, grid: tuple[int, int]) -> list[Tensor | None]:
        """log Φp of every layer for a grid of (rows, columns) tokens, see :mod:`pipeline.models.pervit.phi_model`; empty without Φp."""
        return []

    def whole(self) -> tuple[nn.Module, str]:
        """The module, and its method's name, that ``train.compile=model`` compiles."""
        return self, "class_scores"

    def prepared_weights(self, weights: Mapping[str, Tensor], source: str) -> Mapping[str, Tensor]:
        """Weights of a file, before they are compared with the model's; ``source`` names it in messages."""
        return weights

    def remarks(self, mean: Sequence[float], std: Sequence[float]) -> list[str]:
        """Sentences for the log of a run whose images are normalized by ``mean`` and ``std``."""
        return []

    def no_weight_decay(self) -> set[str]:
        """Parameters with more than one dimension that are excluded from weight decay."""
        return set()

    @property
    def num_layers(self) -> int:
        """Layers that :meth:`layer_of` tells apart: the stem, each block, and the classifier."""
        return len(self._block_prefixes()) + 2

    def layer_of(self, name: str) -> int:
        """The layer of a parameter for layer-wise learning-rate decay, from 0 to ``num_layers - 1``.

        The rule and the numbers of timm's ``param_groups_layer_decay`` (after BEiT, Bao et al., ICLR 2022): 0 is the stem with class
        token and position embeddings, the blocks follow in order of execution, the final norm belongs to the last of them, and the
        classifier is the last layer. What a stage has outside of its blocks, such as downsampling, belongs to its first block.
        """
        if name.startswith(self.head_names):
            return self.num_layers - 1
        blocks = self._block_prefixes()
        if name.startswith(("norm.", "output_norms.")):
            return len(blocks)
        for number, prefix in enumerate(blocks, start=1):
            stage = prefix.rpartition("blocks.")[0]  # such as "stages.2.", or "" in a model without stages
            if name.startswith(prefix) or (stage and name.startswith(stage) and not name.startswith(f"{stage}blocks.")):
                return number
        return 0

    def _block_prefixes(self) -> list[str]:
        """Prefixes of the names of each block's parameters, such as ``stages.2.blocks.0.``, in order of execution."""
        return [f"{name}." for name, _ in self.named_modules() if re.fullmatch(r"(\w+\.\d+\.)?blocks\.\d+", name)]

    def reference_tables(self) -> dict[str, Tensor]:
        """Constant tables that the authors' state dicts contain, under the authors' names; here they are computed on demand."""
        return {}

    def unpublished_switch(self) -> str | None:
        """The first switch whose setting the authors' code does not support; None if it supports this model."""
        for name, field in type(self.switches).model_fields.items():
            if name not in self.reference_switches and getattr(self.switches, name) != field.default:
                return name
        return None

    def branch_scales(self, batch: int, noise: Tensor | None) -> Tensor | None:
        """Stochastic-depth factors of the residual branches (Huang et al., ECCV 2016), by the noise of :meth:`class_scores`.
        Returns (B, branches), 0 or ``1 / (1 - rate)``; None where nothing is dropped: in eval mode or with rates of 0."""
        if not self.training or not self._drops:
            return None
        rates = self.drop_path_rates
        return dropout_factors(rates, torch.rand(batch, rates.numel(), device=rates.device) if noise is None else noise)

    def block_scales(self, batch: int, noise: Tensor | None, branches: int = 2) -> Iterator[Tensor | None]:
        """The columns of :meth:`branch_scales` of one block after the other: (B, branches) each, or None."""
        scales = self.branch_scales(batch, noise)
        return repeat(None) if scales is None else iter(scales.split(branches, dim=1))

    def run_block(self, block: nn.Module, *arguments: Any) -> Tensor:
        """``block(*arguments)``, under activation checkpointing if it is on. A block has no BatchNorm: recomputation would update its
        running statistics twice."""
        if self.activation_checkpointing and self.training:
            return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return block(*arguments)


def as_features(model: AnyModel) -> AnyModel:
    """Turn a classifier, of ``create_model`` or ``load``, into its feature form, in place: ``model(images)`` is then the list of its
    feature maps, and ``strides`` and ``widths`` are set. A feature form is returned as it is.

    The head goes. All other parameters stay, under their names. Each map but the last gets a LayerNorm of its own, which starts
    as plain normalization, as the backbones of Swin Transformer (Liu et al., ICCV 2021) have them; the last map has the
    classifier's. Images may have any size that the stem divides: learned position embeddings are resampled to it.
    """
    if model.strides:
        return model
    model.strides, model.widths = model.feature_layout()
    for prefix in model.head_names:
        delattr(model, prefix.rstrip("."))
    like, eps = model.norm.weight, model.norm.eps
    model.output_norms = nn.ModuleList(
        nn.LayerNorm(width, eps=eps, device=like.device, dtype=like.dtype) for width in model.widths[:-1]
    ).train(model.training)
    return model


def dropout_factors(rates: Tensor, noise: Tensor) -> Tensor:
    """Factors of dropout by noise (B, n) in [0, 1) at rates that broadcast to it: 0 if dropped, else ``1 / (1 - rate)``."""
    keep = 1.0 - rates
    return (noise >= rates).to(keep.dtype) / keep


def scale_branch(branch: Tensor, scales: Tensor | None, column: int) -> Tensor:
    """Multiply a residual branch (B, ...) by column ``column`` of the factors (B, branches); None: unchanged."""
    if scales is None:
        return branch
    return branch * scales[:, column].view(-1, *[1] * (branch.ndim - 1)).to(branch.dtype)


def linear_drop_path(rate: float, blocks: int, branches: int = 2) -> list[float]:
    """DeiT's rule: drop rates grow linearly from 0 in the first block to ``rate`` in the last, equal within a block."""
    return torch.linspace(0, rate, blocks, device="cpu").repeat_interleave(branches).tolist()
