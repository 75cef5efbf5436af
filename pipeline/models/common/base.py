"""Define the base class of all models: the interface that training, evaluation and checkpoints rely on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.config import Section
from pipeline.errors import UserError
from pipeline.models.common.features import FeatureSource
from pipeline.models.common.layers import drop_path_scales


class Switches(Section):
    """Base of a family's ablation switches (``model.switches`` in a config). The defaults are the paper's model."""


AnySwitches = TypeVar("AnySwitches", bound=Switches)


class ModelOptions(TypedDict, total=False):
    """Arguments of every family's model, beside its layout.

    Attributes:
        num_classes: outputs of the classifier.
        image_size: side of the square input in pixels.
        drop_path: stochastic depth rate, of the last block where rates grow with the depth.
        activation_checkpointing: recompute each block in the backward pass.
        switches: of the family's class; None: the published model.
    """

    num_classes: int
    image_size: int
    drop_path: float
    activation_checkpointing: bool
    switches: Any


class ModelSettings(NamedTuple):
    """:class:`ModelOptions` with defaults."""

    num_classes: int = 1000
    image_size: int = 224
    drop_path: float = 0.0
    activation_checkpointing: bool = False


def settle(options: ModelOptions, switches: type[AnySwitches]) -> tuple[ModelSettings, AnySwitches]:
    """The arguments of a family's model, complete. Args: switches: the family's class."""
    given: dict[str, Any] = {**options}
    chosen = given.pop("switches", None)
    return ModelSettings(**given), switches() if chosen is None else chosen


class VisionModel(FeatureSource):
    """Base of all families. ``forward(images, noise=None)`` takes (B, 3, H, W) and returns a subclass's ``class_scores``,
    (B, num_classes), or, after :func:`~pipeline.models.common.features.as_features`, its ``feature_maps``.

    Args:
        drop_path_rates: probability of dropping each residual branch, in order of execution.
        activation_checkpointing: :meth:`run_block` recomputes activations in the backward pass.
        switches: the family's ablation switches.

    Attributes:
        reference_names: (authors' name, our name) pairs, used in both directions. The first match applies; a name without a
            match is the same on both sides. ``*`` matches a number, a trailing dot makes the name a prefix.
        reference_switches: switches that do not affect the authors' parameter names: they change shapes only, or no parameter.
        head_names: prefixes of the classifier's parameter names; fine-tuning on other classes reinitializes these.
        leading_tokens: tokens without a grid position (class token) at the start of the position embeddings.
        draws_from_generator: a training step draws from PyTorch's generator besides ``noise``; no model of ours does.
        groups_phi: compute Φp of all layers as one network (:mod:`pipeline.models.pervit.phi_model`); None: but on a CPU.
        generator_seed: what the generator starts from in the next forward pass, for a model that draws from it; None: it goes on.
    """

    reference_names: tuple[tuple[str, str], ...] = ()
    reference_switches: frozenset[str] = frozenset()
    leading_tokens: int = 0
    draws_from_generator: bool = False
    generator_seed: int | None = None
    groups_phi: bool | None = None
    drop_path_rates: Tensor  # (branches,), a buffer

    def __init__(self, drop_path_rates: Sequence[float], activation_checkpointing: bool, switches: Switches) -> None:
        super().__init__()
        self.switches = switches
        self.activation_checkpointing = activation_checkpointing
        rates = torch.tensor(drop_path_rates, dtype=torch.get_default_dtype())
        self.register_buffer("drop_path_rates", rates, persistent=False)  # (branches,)
        self._drops = any(rate > 0 for rate in drop_path_rates)

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Class scores.

        Args:
            images: (B, 3, H, W) of a size that the model takes.
            noise: (B, noise_per_sample) uniform numbers in [0, 1) for stochastic depth and dropout; None: drawn from PyTorch's
                generator. The training loop passes numbers that do not depend on the world size. Unused in eval mode.

        Returns:
            (B, num_classes).

        Raises:
            UserError: another size of images.
        """
        raise NotImplementedError

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Any:  # like the call of any nn.Module
        """``feature_maps`` in the feature form, otherwise ``class_scores``."""
        return self.feature_maps(images, noise) if self.strides else self.class_scores(images, noise)

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
        hook = self.get_submodule("head").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self(images)
        finally:
            hook.remove()
        return seen[0]

    @property
    def has_phi(self) -> bool:
        """Whether the model has PerViT's position-based attention Φp, which is computed once per forward pass for all images."""
        return False

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
        """Weights that a file holds, before they are compared with the model's. Args: source: of them, for messages."""
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

        Args:
            name: of one of ``named_parameters()``.
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

    def position_names(self) -> set[str]:
        """Position embeddings (..., tokens, D), which are resampled when weights are transferred to another image size."""
        return {name for name, _ in self.named_parameters() if name == "position_embedding.weight"}

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
        """Stochastic-depth factors of the residual branches (Huang et al., ECCV 2016).

        Args:
            batch: B.
            noise: (B, noise_per_sample) uniform numbers in [0, 1); None: drawn from PyTorch's generator.

        Returns:
            (B, branches), or None where nothing is dropped: in eval mode or with rates of 0.
        """
        if not self.training or not self._drops:
            return None
        rates = self.drop_path_rates
        if noise is None:
            noise = torch.rand(batch, rates.numel(), device=rates.device)
        return drop_path_scales(rates, noise)

    def run_block(self, block: nn.Module, *arguments: Any) -> Tensor:
        """``block(*arguments)``, under activation checkpointing if it is on.

        Not for blocks with BatchNorm: recomputation would update its running statistics twice.
        """
        if self.activation_checkpointing and self.training:
            return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
        return block(*arguments)


def check_sides(sides: Iterable[int], unit: int, least: int | None = None, of_images: bool = False) -> None:
    """Check an image size.

    Args:
        sides: in pixels.
        unit: divides them.
        least: smallest side; None: ``unit``.
        of_images: the sides are those of images, not ``model.image_size``.

    Raises:
        UserError: a side does not fit.
    """
    least = least or unit
    for side in sides:
        if side % unit or side < least:
            near = max(least, round(side / unit) * unit)
            raise UserError(
                f"{'a side of an image' if of_images else 'model.image_size'} must be a multiple of {unit} and at least {least}, got {side}",
                f"pad or resize the images, for example to {near}" if of_images else f"set it to {near}",
            )


def scale_branch(branch: Tensor, scales: Tensor | None, column: int) -> Tensor:
    """Multiply a residual branch (B, ...) by column ``column`` of the factors (B, branches); None: unchanged."""
    if scales is None:
        return branch
    return branch * scales[:, column].view(-1, *[1] * (branch.ndim - 1)).to(branch.dtype)


def scales_of_block(scales: Tensor | None, block: int, branches: int = 2) -> Tensor | None:
    """The columns of one block: (B, blocks * branches) -> (B, branches)."""
    return None if scales is None else scales[:, branches * block : branches * (block + 1)]


def linear_drop_path(rate: float, blocks: int, branches: int = 2) -> list[float]:
    """DeiT's rule: drop rates grow linearly from 0 in the first block to ``rate`` in the last, equal within a block."""
    return torch.linspace(0, rate, blocks, device="cpu").repeat_interleave(branches).tolist()
