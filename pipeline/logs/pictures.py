"""Draw images for TensorBoard: training samples with their labels, peripheral attention, and accuracy by class.

Every picture is (3, height, width) uint8.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from pipeline.loader.loader import Batch
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import patch_grid
from pipeline.runs.pictures import IMAGES as IMAGES

PHI = "weights/peripheral_attention"  # its name in TensorBoard; "weights" sorts after the curves
CLASSES = "eval/worst_and_best_classes"

_GAP = 6  # pixels between two tiles
_TEXT, _LINE = 11, 14  # height of letters, of a line of text
_SMALLEST_IMAGE, _SMALLEST_MAP = 112, 56  # pixels per side; smaller ones are enlarged by a whole factor, to be legible
_MANY_CLASSES, _BAR = 20, 120  # worst or best classes that are shown; pixels of a full bar
_LONGEST_NAME, _MOST_LETTERS = 150, 40  # of a class: pixels, and letters before it is measured, which takes time
_VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")  # from 0 to 1


def image_grid(batch: Batch, classes: list[str], mean: tuple[float, ...], std: tuple[float, ...], count: int = 16) -> Tensor:
    """The first images of a batch as the model sees them, each above its label, or both labels of a mixture. ``batch``: images
    (B, 3, H, W), normalized; ``mean``, ``std``: per channel."""
    shown = batch.images[:count].float().cpu()
    colours = (shown * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]).clamp(0, 1)
    pixels = (255 * colours).round().byte().permute(0, 2, 3, 1).numpy()  # (n, H, W, 3)
    tiles = [_enlarge(image, _SMALLEST_IMAGE) for image in pixels]
    return _tensor(_sheet(tiles, columns=4, below=_labels(batch, classes)[:count]))


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
def peripheral_maps(model: VisionModel, image_size: int) -> Tensor | None:
    """Φp of every layer and head for the query at the centre, as in Fig. 4 of the PerViT paper, (layers, heads, rows, columns) in
    [0, 1], on the CPU; None for a model without Φp. Call in eval mode. Collective under ZeRO-3, which gathers the parameters."""
    if not model.has_phi:
        return None
    rows, columns = grid = patch_grid(image_size, image_size, model.patch)
    centre = rows // 2 * columns + columns // 2
    maps = torch.stack([layer[:, centre] for layer in model.log_phi(grid) if layer is not None])  # (layers, heads, N)
    return maps.exp().float().cpu().unflatten(2, grid)


def map_grid(maps: Tensor) -> Tensor:
    """An image of :func:`peripheral_maps`: one row per layer, one column per head, from 0 (violet) to 1 (yellow). The axes
    count patches, and have the row and the column of the query."""
    layers, heads, rows, columns = maps.shape
    tiles = [_enlarge(_coloured(phi), _SMALLEST_MAP) for phi in maps.flatten(0, 1).numpy()]
    left, above = [f"layer {layer + 1}        " for layer in range(layers)], [f"head {head + 1}" for head in range(heads)]
    sheet = _sheet(tiles, columns=heads, left=left, above=above)
    title = f"Phi_p of the query in the middle: patch ({rows // 2}, {columns // 2}) of {rows} x {columns}"
    bar = Image.fromarray(_coloured(np.linspace(0, 1, 128)[None].repeat(_TEXT, axis=0)))
    sides = 2 * _GAP + _width(["0 "]), _width([" 1"])
    wide = max(sheet.width, _width([title]) + 2 * _GAP, bar.width + sum(sides))
    whole = Image.new("RGB", (wide, sheet.height + 3 * _LINE + 2 * _GAP), "white")
    whole.paste(sheet, (0, _LINE))
    _write(whole, (_GAP, _GAP // 2), title, wide)
    height, width, _ = tiles[0].shape
    x0, y0 = sheet.width - heads * (width + _GAP), _LINE + sheet.height - layers * (height + _GAP)  # of the first tile
    for row in range(layers):
        _ticks(whole, x0 - 2, y0 + row * (height + _GAP), rows, height // rows, downward=True)
    for column in range(heads):
        _ticks(whole, x0 + column * (width + _GAP), y0 + layers * (height + _GAP) - _GAP + 1, columns, width // columns)
    y = whole.height - _LINE - _GAP // 2
    _write(whole, (_GAP, y), "0", 2 * _TEXT)
    whole.paste(bar, (sides[0], y + 1))
    _write(whole, (sides[0] + bar.width, y), " 1", 2 * _TEXT)
    return _tensor(whole)


def _ticks(sheet: Image.Image, x: int, y: int, patches: int, size: int, downward: bool = False) -> None:
    """Label the first, the middle and the last patch of a tile, below it, or left of it going down. ``x``, ``y``: where the
    axis begins; ``patches``: along the axis, each of ``size`` pixels."""
    draw, font = ImageDraw.Draw(sheet), _font()
    for patch in dict.fromkeys((0, patches // 2, patches - 1)):
        if patch not in (0, patches - 1) and (patches - 1 - patch) * size < _TEXT + 1:
            continue  # it would run into the last
        place, text = round((patch + 0.5) * size), str(patch)
        if downward:
            draw.line([(x - 2, y + place), (x, y + place)], fill="black")
            draw.text((x - 4 - _width([text]), y + place - _LINE // 2), text, fill="black", font=font)
        else:
            draw.line([(x + place, y), (x + place, y + 2)], fill="black")
            left = min(max(place - _width([text]) // 2, 0), patches * size - _width([text]))
            draw.text((x + left, y + 3), text, fill="black", font=font)


def class_bars(classes: Sequence[str], correct: Sequence[int], count: Sequence[int]) -> Tensor:
    """Top-1 accuracy of the classes as bars: of all, or of the 20 worst and the 20 best. ``correct``, ``count``: right and all
    images of each class; a class without images is left out."""
    found = zip(classes, correct, count)
    shares = sorted((right / total, name[:_MOST_LETTERS], total) for name, right, total in found if total)
    few = len(shares) <= 2 * _MANY_CLASSES
    parts = [shares] if few else [shares[:_MANY_CLASSES], shares[-_MANY_CLASSES:]]
    titles = ["top-1 by class"] if few else [f"the {_MANY_CLASSES} worst of {len(shares)} classes", f"the {_MANY_CLASSES} best"]
    name_width = min(_LONGEST_NAME, _width([name for part in parts for _, name, _ in part] or [""]))
    numbers = name_width + 3 * _GAP + _BAR
    width = numbers + _width(["100.0 % of 9999"]) + 2 * _GAP
    rows = max(map(len, parts))
    sheet = Image.new("RGB", (width * len(parts), (rows + 1) * _LINE + 2 * _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for x, title, part in zip(range(0, sheet.width, width), titles, parts):
        _write(sheet, (x + _GAP, _GAP // 2), title, width)
        for row, (share, name, of) in enumerate(part):
            y, begin = _GAP + (row + 1) * _LINE, x + name_width + 2 * _GAP
            _write(sheet, (x + _GAP, y), name, name_width)
            draw.rectangle((begin, y + 2, begin + _BAR, y + _LINE - 2), fill="#e6e6e6")
            if share:
                draw.rectangle((begin, y + 2, begin + round(share * _BAR), y + _LINE - 2), fill="#21918c")
            _write(sheet, (x + numbers, y), f"{100 * share:.1f} % of {of}", width)
    return _tensor(sheet)


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
