"""Compute the peripheral position encoding Φp once per forward pass, for all images: the base class of models that have it.

On a GPU the layers' networks, which have one shape, are groups of the channels of one network: about 34 operators a layer, forward and
backward, become 64 for all of them, which matters where launching a small kernel takes longer than running it; the published design's
convolutions are kernels of their own (:mod:`pipeline.kernels.phi`). Not on a CPU, where the maps of one layer stay in a cache and those of
all do not: 12 layers of PerViT-T take 2.3 times as long as one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.kernels.peripheral import phi_maps, suits_kernels
from pipeline.models.common.base import VisionModel
from pipeline.models.common.layers import ModuleList, as_written
from pipeline.models.pervit import position
from pipeline.models.pervit.position import PeripheralPosition, PhiDesign


def grouped_log_phi(
    layers: Sequence[PeripheralPosition], distance: Tensor, scale: Tensor, offset: Tensor
) -> tuple[Tensor, ...]:
    """:class:`PeripheralPosition` of layers of one shape together: (heads, N, N) for each, equal to their own up to rounding.

    The parameters must be at hand, not sharded by ZeRO-3; hooks of the layers' modules do not run.
    """

    def together(name: str) -> Tensor:  # (layers * channels, ...)
        return torch.cat([layer.get_parameter(name) for layer in layers])

    def normalized(maps: Tensor, name: str) -> Tensor:
        return F.instance_norm(maps, weight=together(f"{name}.weight"), bias=together(f"{name}.bias"), eps=position.NORM_EPS)

    two = layers[0].layers == 2
    with as_written(distance):  # as each layer by itself
        first, shift = position.scaled(distance, scale, offset, together("projection1.weight"), together("projection1.bias"))
        if two and suits_kernels(distance, first):
            weight, bias, second = (together(name) for name in ("norm1.weight", "norm1.bias", "projection2.weight"))
            r = phi_maps(distance, first, shift, weight, bias, second, position.NORM_EPS)
            r = r + together("projection2.bias")[:, None, None]  # (N, layers * heads, H, W)
        else:
            r = normalized(F.conv2d(distance, first, shift), "norm1")  # (N, layers * hidden, ...)
            if two:
                weight, bias = together("projection2.weight"), together("projection2.bias")
                r = F.conv2d(F.relu(r, inplace=True), weight, bias, groups=len(layers))  # the norm does not need its output
        if two:
            r = normalized(r, "norm2")
        maps = F.logsigmoid(r).flatten(2).transpose(0, 1).contiguous()  # (layers * heads, N, N)
        return maps.unflatten(0, (len(layers), -1)).unbind(0)


class PhiModel(VisionModel):
    """A model whose blocks may each have a ``position`` (:class:`~pipeline.models.pervit.position.PeripheralPosition`).

    A subclass calls :meth:`add_phi_inputs`, without which it has no Φp, and creates ``blocks``; its ``forward`` gets the maps
    from :meth:`log_phi`.
    """

    blocks: ModuleList[Any]
    phi_design: PhiDesign | None = None
    _phi_cache: tuple[tuple, list[Tensor | None]] | None = None

    def add_phi_inputs(self, heads: int, side: int, design: PhiDesign) -> None:
        """Create the modules shared by all layers: the scales of the distances, and the distances themselves if learned.
        ``side``: rows and columns of the patch grid, at least 2; fixed for the model only if distances are learned."""
        if side < 2:
            raise UserError(f"model.image_size gives {side} x {side} patches, but Φp requires at least 2 x 2", "set it to 32")
        self.phi_design = design
        self.register_load_state_dict_post_hook(lambda module, _: setattr(module, "_phi_cache", None))
        if design.distance == "learned":
            self.position_vectors = position.LearnedVectors(4 * heads, (side, side), design.border)
        self.distance_scales = position.DistanceScales(4 * heads, design.init)

    def log_phi(self, grid: tuple[int, int]) -> list[Tensor | None]:
        """See the base class: (heads, N, N) per block, None without Φp. In eval mode without gradients the maps are cached until a
        parameter or the mode changes."""
        if self.phi_design is None:
            return [None] * len(self.blocks)
        if min(grid) < 2:  # of one patch the coordinates cannot be normalized
            problem = f"the images give {grid[0]} x {grid[1]} patches, but Φp requires at least 2 x 2"
            raise UserError(problem, "pad or resize them")
        # A graph of torch.export has the maps' own operators, whatever was computed before.
        cacheable = not self.training and not torch.is_grad_enabled() and not torch.compiler.is_exporting()
        if cacheable:
            key = (grid, tuple(p._version for p in self.phi_parameters()))
            if self._phi_cache is not None and self._phi_cache[0] == key:
                return self._phi_cache[1]
        if self.phi_design.distance == "learned":
            distance = self.position_vectors(grid)
        else:  # device and dtype come from a buffer: under ZeRO-3, accessing a parameter here would gather it
            like = self.drop_path_rates
            distance = position.position_distances(*grid, like.device, like.dtype, self.phi_design.border)
        scale, offset = self.distance_scales()
        layers = [block.position for block in self.blocks]
        maps: list[Tensor | None]
        # ZeRO-3 gathers a module's parameters when the module is called, and marks them with a number.
        sharded = any(hasattr(parameter, "ds_id") for parameter in layers[0].parameters())
        if not sharded and (distance.device.type != "cpu" if self.groups_phi is None else self.groups_phi):
            maps = [*grouped_log_phi(layers, distance, scale, offset)]
        else:
            maps = [layer(distance, scale, offset) for layer in layers]
        if cacheable and type(maps[0]) is Tensor:  # a fake tensor, of torch.export for example, has no values
            self._phi_cache = (key, maps)
        return maps

    def phi_parameters(self) -> Iterator[nn.Parameter]:
        if self.phi_design is None:
            return
        if self.phi_design.distance == "learned":
            yield from self.position_vectors.parameters()
        yield from self.distance_scales.parameters()
        for block in self.blocks:
            yield from block.position.parameters()

    def no_weight_decay(self) -> set[str]:
        """Learned positions, like other position embeddings; Φp's projections are decayed (the authors' recipe)."""
        return super().no_weight_decay() | {"position_vectors.weight"}

    def train(self, mode: bool = True) -> PhiModel:
        self._phi_cache = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> PhiModel:  # .to(), .half(), ...
        self._phi_cache = None
        return super()._apply(*args, **kwargs)
