"""PerViT: the two extremes of multi-head peripheral attention, built as weights (Min et al., NeurIPS 2022, Appendix C, Fig. S3).

With nine heads that attend to one neighbour of the query each, the layer is a 3x3 convolution; with Φp = 1 it is multi-head
self-attention. The appendix assumes the maps Φp; here the position encoding's own weights produce them: a kernel of the first
peripheral projection with a single tap shifts the map of distances by one token, so that it is 0 at that neighbour.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.analysis.chapter import Findings, Plot, figure
from pipeline.analysis.maps import map_figure
from pipeline.analysis.pervit import PHI, PeripheralChapter
from pipeline.analysis.style import numbers
from pipeline.models.common.vit import SelfAttention
from pipeline.models.pervit.model import PeripheralAttention
from pipeline.models.pervit.position import DistanceScales, PeripheralPosition, position_distances

TAPS = [(row, column) for row in range(3) for column in range(3)]  # of a 3x3 kernel; a head each
_SHARPNESS = 1e4  # weight of the last norm: the nearest key is ahead of the next by a thousandth of it at least


@dataclass(frozen=True)
class Layer:
    """A layer of peripheral attention with its position encoding, in float64."""

    attention: PeripheralAttention
    position: PeripheralPosition
    scales: DistanceScales

    def log_phi(self, grid: tuple[int, int]) -> Tensor:
        """(heads, N, N)."""
        return self.position(position_distances(*grid, torch.device("cpu"), torch.float64), *self.scales())

    def __call__(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, N, width) -> (B, N, width)."""
        return self.attention(x, self.log_phi(grid))


@torch.no_grad()
def as_convolution(convolution: nn.Conv2d) -> Layer:
    """The layer whose nine heads are a 3x3 convolution (Eq. 42 to 54), for any content attention.

    The layer is 9 · in_channels wide: the appendix assumes heads as wide as the input. Its input has the convolution's in its first
    channels and anything in the others; its output has the convolution's in its first. The convolution is 3x3, with stride 1 and zero
    padding of 1, not dilated, of one group and with out_channels of at most 9 · in_channels. :func:`convolved` applies the layer.
    """
    channels, outputs = convolution.in_channels, convolution.out_channels
    layer = _new_layer(9 * channels)
    values = layer.attention.qkv.weight[-9 * channels :].view(9, channels, 9 * channels)  # queries and keys stay random
    values.zero_()
    values[:, range(channels), range(channels)] = 1.0  # every head takes the input's first channels
    projection = layer.attention.proj.weight.view(9 * channels, 9, channels)
    projection.zero_()
    for head, (row, column) in enumerate(TAPS):
        projection[:outputs, head] = convolution.weight[:, :, row, column].double()
    layer.attention.proj.bias.zero_()
    if convolution.bias is not None:
        layer.attention.proj.bias[:outputs] = convolution.bias.double()

    position = layer.position
    for parameter in (*layer.scales.parameters(), *position.parameters()):
        parameter.zero_()
    layer.scales.weight[0] = -1.0  # the nearer, the larger
    for head, (row, column) in enumerate(TAPS):  # at the key of this tap, the opposite tap sees the query
        position.projection1.weight[head, 0, 2 - row, 2 - column] = 1.0
        position.projection2.weight[head, head, 1, 1] = 1.0
    position.norm1.weight.fill_(1.0)
    position.norm1.bias.fill_(100.0)  # ReLU changes nothing
    position.norm2.weight.fill_(_SHARPNESS)
    position.norm2.bias.fill_(-100 * _SHARPNESS)  # where log σ(x) is x
    return layer


@torch.no_grad()
def as_self_attention(attention: SelfAttention) -> Layer:
    """The layer that is self-attention without bias of queries, keys and values (Eq. 55 to 58): the last norm's bias makes Φp = 1."""
    layer = _new_layer(attention.proj.in_features, attention.heads)
    layer.attention.load_state_dict(attention.state_dict())
    layer.position.norm2.bias.fill_(1e3)  # log σ(1000) is 0
    return layer


def convolved(layer: Layer, images: Tensor) -> Tensor:
    """Apply :func:`as_convolution`'s layer to images: (B, in_channels, rows, columns) float64 -> (B, 9 · in_channels, rows, columns). The
    padding is a border of zero tokens, which are keys like others; as queries they are left out of the result."""
    padded = F.pad(images, (1, 1, 1, 1))  # (B, in_channels, rows + 2, columns + 2)
    grid = padded.shape[2], padded.shape[3]
    tokens = F.pad(padded.flatten(2).transpose(1, 2), (0, 8 * images.shape[1]))  # (B, N, 9 * in_channels)
    return layer(tokens, grid).transpose(1, 2).unflatten(2, grid)[..., 1:-1, 1:-1]


def _new_layer(width: int, heads: int = 9) -> Layer:
    attention, position = PeripheralAttention(width, heads), PeripheralPosition(heads, 0, 1)
    return Layer(attention.double(), position.double(), DistanceScales(4 * heads).double())


class ExtremesChapter(PeripheralChapter):
    """``extremes``: the layers of Appendix C, of the model's grid; they do not depend on its weights."""

    @figure("extremes", "Convolution and self-attention as extremes", "PerViT, Appendix C, Fig. S3")
    @torch.no_grad()
    def _extremes(self, findings: Findings) -> Plot:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            convolution, plain = nn.Conv2d(4, 4, 3, padding=1).double(), SelfAttention(36, 9, qkv_bias=False).double()
            image, tokens = torch.randn(2, 4, *self.grid).double(), torch.randn(2, self.grid[0] * self.grid[1], 36).double()
            local, uniform = as_convolution(convolution), as_self_attention(plain)
        errors = {
            "convolution_error": (convolved(local, image)[:, :4] - convolution(image)).abs().max().item(),
            "self_attention_error": (uniform(tokens, self.grid) - plain(tokens)).abs().max().item(),
        }
        for name, error in errors.items():
            findings.measure(f"extremes.{name}", error, "largest difference of an output of order 1, float64")
        # (9, N) each; the first's exp is below float64
        logs = [layer.log_phi(self.grid)[:, self.query_index] for layer in (local, uniform)]
        maps = torch.stack([(log - log.amax(-1, keepdim=True)).exp().unflatten(1, self.grid) for log in logs])
        labels: dict[str, Any] = {
            "rows": ("convolution", "self-attention"),
            "columns": numbers(len(TAPS)),
            "xlabel": "Head",
            "limits": (0.0, 1.0),
        }
        return Plot(
            "Φp of two layers with nine heads that were built by hand, for the framed query. Above, each head attends to one neighbour and "
            "the layer is a 3 x 3 convolution; below, Φp is 1 and the layer is plain self-attention. Their outputs differ from those of a "
            f"convolution and of self-attention by {errors['convolution_error']:.0e} and {errors['self_attention_error']:.0e} at most, "
            "rounding of float64. They do not depend on the checkpoint.",
            partial(map_figure, maps, f"{PHI['phi_p']}, largest = 1", self.query, **labels, cell=0.8),
        )
