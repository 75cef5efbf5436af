"""Triton code of the two convolutions of the peripheral position encoding Φp and of their gradients (:mod:`pipeline.kernels.phi`).

A program holds maps of one layer and one query in registers, computes them again where it needs them, and multiplies with matrix
instructions. Each number is written by one program and added up in a fixed order, so that repeated runs agree bit for bit. The hidden
maps, two rows and columns larger than the grid of tokens, and the result have their positions in row-major order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipeline.kernels.tiles import product


@triton.jit
def _convolved(distance, kernel, row, column, channel, WIDTH: tl.constexpr, HIDDEN: tl.constexpr):
    """The first convolution of a query's distances (H + 4, WIDTH) at positions (P,) of its result: (P, channels)."""
    result = tl.zeros([row.shape[0], channel.shape[0]], tl.float32)
    for tap in tl.static_range(9):
        values = tl.load(distance + (row + tap // 3) * WIDTH + column + tap % 3)
        result += values[:, None] * tl.load(kernel + channel * 9 + tap, mask=channel < HIDDEN, other=0.0)[None, :]
    return result


@triton.jit
def _hidden(
    distance, kernel1, weight, bias, channel,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, POSITIONS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Maps of some channels after the first convolution, (POSITIONS, channels), with mean and 1 / standard deviation (channels,) of each,
    and the scale and the bias of the norm."""
    count: tl.constexpr = (ROWS + 2) * (COLUMNS + 2)
    position = tl.arange(0, POSITIONS)
    inside = (position < count)[:, None]
    place = tl.minimum(position, count - 1)
    maps = _convolved(distance, kernel1, place // (COLUMNS + 2), place % (COLUMNS + 2), channel, COLUMNS + 4, HIDDEN)
    mean = tl.sum(tl.where(inside, maps, 0.0), 0) / count
    centred = tl.where(inside, maps - mean[None, :], 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, 0) / count + EPS)
    scale = tl.load(weight + channel, mask=channel < HIDDEN, other=0.0)
    shift = tl.load(bias + channel, mask=channel < HIDDEN, other=0.0)
    return centred, mean, deviation, scale, shift


@triton.jit
def phi_forward(
    distance, kernel1, weight, bias, kernel2, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, POSITIONS: tl.constexpr,
    KEYS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query of one layer: its maps (heads, H, W) in ``out`` (N, layers * heads, H, W)."""
    tokens: tl.constexpr = ROWS * COLUMNS
    query = tl.program_id(0) % tokens
    layer = tl.program_id(0) // tokens
    layers = tl.num_programs(0) // tokens
    distance += query * ((ROWS + 4) * (COLUMNS + 4))
    kernel1 += layer * HIDDEN * 9
    key = tl.arange(0, KEYS)
    token = tl.minimum(key, tokens - 1)
    head = tl.arange(0, OUTPUTS)
    total = tl.zeros([KEYS, OUTPUTS], tl.float32)
    for first in tl.range(0, HIDDEN, CHANNELS, num_stages=1):
        channel = first + tl.arange(0, CHANNELS)
        _, mean, deviation, scale, shift = _hidden(
            distance, kernel1, weight + layer * HIDDEN, bias + layer * HIDDEN, channel, ROWS, COLUMNS, HIDDEN, POSITIONS, EPS
        )
        scale *= deviation
        shift -= mean * scale
        for tap in tl.range(9, num_stages=1):
            row, column = token // COLUMNS + tap // 3, token % COLUMNS + tap % 3
            neighbours = _convolved(distance, kernel1, row, column, channel, COLUMNS + 4, HIDDEN)
            rectified = tl.maximum(neighbours * scale[None, :] + shift[None, :], 0.0)
            taps = ((layer * HEADS + head[None, :]) * HIDDEN + channel[:, None]) * 9 + tap
            factors = tl.load(kernel2 + taps, mask=(head[None, :] < HEADS) & (channel[:, None] < HIDDEN), other=0.0)
            total = product(rectified, factors, total, PRECISION)
    out += (query * layers * HEADS + layer * HEADS) * tokens
    tl.store(out + head[None, :] * tokens + key[:, None], total, mask=(head[None, :] < HEADS) & (key[:, None] < tokens))


@triton.jit
def phi_backward(
    distance, kernel1, weight, bias, kernel2, dout, dkernel1, dweight, dbias, dkernel2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HIDDEN: tl.constexpr, HEADS: tl.constexpr, POSITIONS: tl.constexpr,
    KEYS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, EPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one query gives to the gradients of one layer's chunk of channels: its rows in sums' parts (N, ...). ``dout`` is
    (N, layers, H * W, heads)."""
    tokens: tl.constexpr = ROWS * COLUMNS
    count: tl.constexpr = (ROWS + 2) * (COLUMNS + 2)
    chunks: tl.constexpr = (HIDDEN + CHANNELS - 1) // CHANNELS
    split: tl.constexpr = POSITIONS // 16
    chunk = tl.program_id(0) % chunks
    query = tl.program_id(0) // chunks % tokens
    layer = tl.program_id(0) // (chunks * tokens)
    layers = tl.num_programs(0) // (chunks * tokens)
    distance += query * ((ROWS + 4) * (COLUMNS + 4))
    channel = chunk * CHANNELS + tl.arange(0, CHANNELS)
    kernel1 += layer * HIDDEN * 9
    centred, _, deviation, scale, shift = _hidden(
        distance, kernel1, weight + layer * HIDDEN, bias + layer * HIDDEN, channel, ROWS, COLUMNS, HIDDEN, POSITIONS, EPS
    )
    position = tl.arange(0, POSITIONS)
    inside = position < count
    place = tl.minimum(position, count - 1)
    row, column = place // (COLUMNS + 2), place % (COLUMNS + 2)
    normed = centred * deviation[None, :]
    rectified = tl.where(inside[:, None], tl.maximum(normed * scale[None, :] + shift[None, :], 0.0), 0.0)

    # Through the second convolution.
    dout += (query * layers + layer) * (tokens * HEADS)
    dkernel2 += query * layers * (HEADS * HIDDEN * 9)
    head = tl.arange(0, OUTPUTS)
    dmaps = tl.zeros([POSITIONS, CHANNELS], tl.float32)
    for tap in tl.range(9, num_stages=1):
        key_row, key_column = row - tap // 3, column - tap % 3
        is_key = inside & (key_row >= 0) & (key_row < ROWS) & (key_column >= 0) & (key_column < COLUMNS)
        entries = (key_row * COLUMNS + key_column)[:, None] * HEADS + head[None, :]
        gradient = tl.load(dout + entries, mask=is_key[:, None] & (head[None, :] < HEADS), other=0.0)
        taps = ((layer * HEADS + head[:, None]) * HIDDEN + channel[None, :]) * 9 + tap
        known = (head[:, None] < HEADS) & (channel[None, :] < HIDDEN)
        dmaps = product(gradient, tl.load(kernel2 + taps, mask=known, other=0.0), dmaps, PRECISION)
        # The sum over positions in parts, so that a warp multiplies its own.
        parts = tl.permute(tl.reshape(gradient, [split, POSITIONS // split, OUTPUTS]), (0, 2, 1))
        others = tl.reshape(rectified, [split, POSITIONS // split, CHANNELS])
        factors = tl.sum(tl.dot(parts, others, input_precision=PRECISION), 0)  # (heads, channels)
        tl.store(dkernel2 + taps, factors, mask=known)

    # Through ReLU, norm and the first convolution.
    dmaps = tl.where(rectified > 0.0, dmaps, 0.0)
    sums, products = tl.sum(dmaps, 0), tl.sum(dmaps * normed, 0)
    place = query * layers * HIDDEN + layer * HIDDEN + channel
    tl.store(dbias + place, sums, mask=channel < HIDDEN)
    tl.store(dweight + place, products, mask=channel < HIDDEN)
    dmaps = (dmaps - (sums[None, :] + normed * products[None, :]) / count) * (scale * deviation)[None, :]
    dmaps = tl.where(inside[:, None], dmaps, 0.0)
    for tap in tl.range(9, num_stages=1):
        values = tl.load(distance + (row + tap // 3) * (COLUMNS + 4) + column + tap % 3)
        tl.store(dkernel1 + place * 9 + tap, tl.sum(dmaps * values[:, None], 0), mask=channel < HIDDEN)
