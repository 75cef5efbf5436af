"""Images for TensorBoard: training samples with their labels, and peripheral attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from pipeline.data.loader import Batch
from pipeline.models.pervit.phi_model import PhiModel

IMAGES, PHI = "train/images", "weights/peripheral_attention"  # names in TensorBoard; "weights" sorts after the curves

_GAP = 6  # pixels between two tiles
_TEXT, _LINE = 11, 14  # height of letters, of a line of text
_SMALLEST_IMAGE, _SMALLEST_MAP = 112, 56  # pixels per side; smaller ones are enlarged by a whole factor, to be legible
_VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")  # from 0 to 1


def image_grid(batch: Batch, classes: list[str], mean: tuple[float, ...], std: tuple[float, ...], count: int = 16) -> Tensor:
    """The first images of a batch as the model sees them, each above its label, or both labels of a mixture.

    Args:
        batch: images (B, 3, H, W), normalized.
        classes: their names.
        mean, std: per channel.

    Returns:
        (3, height, width) uint8.
    """
    shown = batch.images[:count].float().cpu()
    colours = (shown * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]).clamp(0, 1)
    pixels = (255 * colours).round().byte().permute(0, 2, 3, 1).numpy()  # (n, H, W, 3)
    tiles = [_enlarge(each, _SMALLEST_IMAGE) for each in pixels]
    return _tensor(_sheet(tiles, columns=8, below=_labels(batch, classes)[:count]))


def _labels(batch: Batch, classes: list[str]) -> list[str]:
    """Captions: "digit 3", or two lines for a mixture, the larger share first."""
    labels = []
    for label, other, weight in zip(batch.labels.tolist(), batch.other_labels.tolist(), batch.weight.tolist()):
        parts = sorted([(weight, classes[label]), (1 - weight, classes[other])], reverse=True)
        if label == other or f"{parts[1][0]:.0%}" == "0%":
            labels.append(parts[0][1])
        else:
            labels.append("\n+ ".join(f"{100 * part:.0f} % {name}" for part, name in parts))
    return labels


@torch.no_grad()
def peripheral_maps(model: nn.Module, image_size: int) -> Tensor | None:
    """Φp of every layer and head for the query at the centre, as in Fig. 4 of the PerViT paper.

    Call in eval mode. Collective under ZeRO-3, which gathers the parameters.

    Args:
        model: the model; one without Φp has no such maps.
        image_size: side of the square input in pixels.

    Returns:
        (layers, heads, rows, columns) in [0, 1], on the CPU; or None.
    """
    if not isinstance(model, PhiModel):
        return None
    rows, columns = model.token_grid(torch.empty(1, 3, image_size, image_size, device="meta"))
    centre = rows // 2 * columns + columns // 2
    log_phi = [layer for layer in model.log_phi((rows, columns)) if layer is not None]
    if not log_phi:  # ablated
        return None
    maps = torch.stack([layer[:, centre] for layer in log_phi]).exp().float().cpu()  # (layers, heads, N)
    return maps.unflatten(2, (rows, columns))


def map_grid(maps: Tensor) -> Tensor:
    """An image of :func:`peripheral_maps`: one row per layer, one column per head, from 0 (violet) to 1 (yellow).

    Returns:
        (3, height, width) uint8.
    """
    layers, heads, _, _ = maps.shape
    tiles = [_enlarge(_coloured(each), _SMALLEST_MAP) for each in maps.flatten(0, 1).numpy()]
    left, above = [f"layer {layer + 1}" for layer in range(layers)], [f"head {head + 1}" for head in range(heads)]
    sheet = _sheet(tiles, columns=heads, left=left, above=above)
    bar = Image.fromarray(_coloured(np.linspace(0, 1, 128)[None].repeat(_TEXT, axis=0)))
    whole = Image.new("RGB", (max(sheet.width, bar.width + 8 * _TEXT), sheet.height + _LINE + _GAP), "white")
    whole.paste(sheet)
    x, y = _GAP + _width(["0 "]), sheet.height
    whole.paste(bar, (x, y))
    _write(whole, (_GAP, y), "0", 2 * _TEXT)
    _write(whole, (x + bar.width + _GAP, y), "1", 2 * _TEXT)
    return _tensor(whole)


def _sheet(
    tiles: list[np.ndarray], columns: int, below: Sequence[str] = (), left: Sequence[str] = (), above: Sequence[str] = ()
) -> Image.Image:
    """Lay out tiles (h, w, 3) of one size in rows, with text below each tile, left of each row and above each column."""
    height, width, _ = tiles[0].shape
    columns = min(columns, len(tiles))
    rows = -(-len(tiles) // columns)
    x0, y0 = _GAP + (_width(left) + _GAP if left else 0), _GAP + (_LINE if above else 0)
    pitch_x, pitch_y = width + _GAP, height + _GAP + _LINE * max((text.count("\n") + 1 for text in below), default=0)
    sheet = Image.new("RGB", (x0 + columns * pitch_x, y0 + rows * pitch_y), "white")
    for i, tile in enumerate(tiles):
        x, y = x0 + i % columns * pitch_x, y0 + i // columns * pitch_y
        sheet.paste(Image.fromarray(tile), (x, y))
        if below:
            _write(sheet, (x, y + height), below[i], width)
    for row, text in enumerate(left):
        _write(sheet, (_GAP, y0 + row * pitch_y + (height - _LINE) // 2), text, x0)
    for column, text in enumerate(above):
        _write(sheet, (x0 + column * pitch_x, _GAP - 2), text, width)
    return sheet


def _write(sheet: Image.Image, corner: tuple[int, int], text: str, width: int) -> None:
    """Draw lines of text, each truncated to ``width`` pixels."""
    for number, line in enumerate(text.split("\n")):
        if _width([line]) > width:
            while line and _width([line + "..."]) > width:
                line = line[:-1]
            line += "..."
        ImageDraw.Draw(sheet).text((corner[0], corner[1] + number * _LINE), line, fill="black", font=_font())


def _width(lines: Sequence[str]) -> int:
    return max(round(_font().getlength(line)) for line in lines)


@functools.cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(_TEXT)


def _tensor(sheet: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(sheet)).permute(2, 0, 1)


def _coloured(values: np.ndarray) -> np.ndarray:
    """(H, W) in [0, 1] -> (H, W, 3) uint8."""
    stops = np.array([list(bytes.fromhex(colour)) for colour in _VIRIDIS])
    place = np.linspace(0, 1, len(stops))
    return np.stack([np.interp(values, place, stops[:, channel]) for channel in range(3)], axis=-1).round().astype(np.uint8)


def _enlarge(pixels: np.ndarray, smallest: int) -> np.ndarray:
    """Enlarge (H, W, 3) by a whole factor, so that the shorter side is at least ``smallest`` pixels."""
    times = -(-smallest // min(pixels.shape[:2]))
    return pixels.repeat(times, axis=0).repeat(times, axis=1)
