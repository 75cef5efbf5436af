"""log Φp of all layers as one network: their networks have one shape, so that the layers are groups of its channels.

About 34 operators a layer, forward and backward, become 64 for all of them, which matters where launching a small kernel takes
longer than running it. Not on a CPU, where the maps of one layer stay in a cache and those of all do not: 12 layers of PerViT-T
take 2.3 times as long as one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.models.pervit.position import NORM_EPS, PeripheralPosition, project_distances


def grouped_log_phi(
    layers: Sequence[PeripheralPosition], distance: Tensor, scale: Tensor, offset: Tensor
) -> tuple[Tensor, ...]:
    """Log of the position-based attention of layers of one shape; hooks of their modules do not run.

    Args:
        layers: whose parameters are at hand, not sharded by ZeRO-3.
        distance, scale, offset: as :meth:`PeripheralPosition.forward` takes them.

    Returns:
        (heads, N, N) for each layer, equal to the layers' own up to rounding.
    """

    def together(name: str) -> Tensor:  # (layers * channels, ...)
        return torch.cat([layer.get_parameter(name) for layer in layers])

    def normalized(maps: Tensor, name: str) -> Tensor:
        return F.instance_norm(maps, weight=together(f"{name}.weight"), bias=together(f"{name}.bias"), eps=NORM_EPS)

    with torch.autocast(distance.device.type, enabled=False):  # as each layer by itself
        r = project_distances(distance, scale, offset, together("projection1.weight"), together("projection1.bias"))
        r = normalized(r, "norm1")  # (N, layers * hidden, ...)
        if layers[0].layers == 2:
            weight, bias = together("projection2.weight"), together("projection2.bias")
            r = F.conv2d(F.relu(r, inplace=True), weight, bias, groups=len(layers))  # the norm does not need its output
            r = normalized(r, "norm2")  # (N, layers * heads, H, W)
        maps = F.logsigmoid(r).flatten(2).transpose(0, 1).contiguous()  # (layers * heads, N, N)
        return maps.unflatten(0, (len(layers), -1)).unbind(0)
