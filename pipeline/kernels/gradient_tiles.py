"""Triton code of the gradients of peripheral attention; :mod:`pipeline.kernels.tiles` explains how tiles are read and written."""

from __future__ import annotations

import triton
import triton.language as tl

from pipeline.kernels.tiles import LOG2E, log2_phi, parts, place_of, product, read_rows, rounded, write_rows


@triton.jit
def _query_step(
    dq, q, dout, k, v, log_phi, log_sum, delta, query, first,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, PHI: tl.constexpr, HEADS: tl.constexpr,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (queries, CHANNELS), still without the scale, plus what a block of keys gives."""
    key = first + tl.arange(0, BLOCK)
    token = tl.minimum(key, TOKENS - 1) if MASKED else key
    k_rows = read_rows(k, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
    v_rows = read_rows(v, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
    scores = product(q, tl.trans(k_rows), None, PRECISION) * (SCALE * LOG2E)
    scores += log2_phi(log_phi, query[:, None], key[None, :], PHI[0], PHI[1], TOKENS, MASKED)
    weights = tl.exp2(scores - log_sum[:, None])
    dweights = product(dout, tl.trans(v_rows), None, PRECISION)
    dscores = weights * (dweights - delta[:, None])
    return product(rounded(dscores, k_rows.dtype), k_rows, dq, PRECISION)


@triton.jit
def query_gradient(
    qkv, log_phi, out, log_sums, dout, dqkv, deltas,
    PHI_HEAD: tl.constexpr, PHI_QUERY: tl.constexpr, PHI_KEY: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head of one image: its rows of dq in ``dqkv``, and ``deltas``, the sums of dout * out of each row,
    which the other gradients need too."""
    image, head, query, token = place_of(QUERIES, HEADS, TOKENS)
    q, k, v = parts(qkv, image, head, HEADS, TOKENS, WIDTH)
    dq, _, _ = parts(dqkv, image, head, HEADS, TOKENS, WIDTH)
    log_phi += head * PHI_HEAD
    merged = (image * TOKENS * HEADS + head) * WIDTH  # of a head in (B, N, heads, width)
    row = (image * HEADS + head) * TOKENS  # of a head in (B, heads, N)
    q_rows = read_rows(q, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
    d_rows = read_rows(dout + merged, token, HEADS * WIDTH, WIDTH, CHANNELS)
    out_rows = read_rows(out + merged, token, HEADS * WIDTH, WIDTH, CHANNELS)
    delta = tl.sum(d_rows.to(tl.float32) * out_rows.to(tl.float32), 1)
    tl.store(deltas + row + query, delta, mask=query < TOKENS)
    log_sum = tl.load(log_sums + row + token)

    full: tl.constexpr = TOKENS // KEYS * KEYS
    result = tl.zeros([QUERIES, CHANNELS], tl.float32)
    for first in range(0, full, KEYS):
        result = _query_step(
            result, q_rows, d_rows, k, v, log_phi, log_sum, delta, token, first,
            KEYS, False, (PHI_QUERY, PHI_KEY), HEADS,
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    if REST:
        result = _query_step(
            result, q_rows, d_rows, k, v, log_phi, log_sum, delta, token, full,
            REST, True, (PHI_QUERY, PHI_KEY), HEADS,
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    write_rows(dq, result * SCALE, query, 3 * HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)


@triton.jit
def _key_step(
    dk, dv, q, dout, k, v, log_phi, log_sums, deltas, key, first,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, PHI: tl.constexpr, HEADS: tl.constexpr,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (keys, CHANNELS), dk still without the scale, plus what a block of queries gives. Tiles are (keys, queries)."""
    query = first + tl.arange(0, BLOCK)
    token = tl.minimum(query, TOKENS - 1) if MASKED else query
    q_rows = read_rows(q, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
    d_rows = read_rows(dout, token, HEADS * WIDTH, WIDTH, CHANNELS)
    scores = product(k, tl.trans(q_rows), None, PRECISION) * (SCALE * LOG2E)
    scores += log2_phi(log_phi, query[None, :], key[:, None], PHI[0], PHI[1], TOKENS, True)
    weights = tl.exp2(scores - tl.load(log_sums + token)[None, :])
    dv = product(rounded(weights, d_rows.dtype), d_rows, dv, PRECISION)
    dweights = product(v, tl.trans(d_rows), None, PRECISION)
    dscores = weights * (dweights - tl.load(deltas + token)[None, :])
    return product(rounded(dscores, q_rows.dtype), q_rows, dk, PRECISION), dv


@triton.jit
def key_value_gradient(
    qkv, log_phi, log_sums, dout, deltas, dqkv,
    PHI_HEAD: tl.constexpr, PHI_QUERY: tl.constexpr, PHI_KEY: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head of one image: its rows of dk and dv in ``dqkv``."""
    image, head, key, token = place_of(KEYS, HEADS, TOKENS)
    q, k, v = parts(qkv, image, head, HEADS, TOKENS, WIDTH)
    _, dk, dv = parts(dqkv, image, head, HEADS, TOKENS, WIDTH)
    dout += (image * TOKENS * HEADS + head) * WIDTH  # (B, N, heads, width)
    log_phi += head * PHI_HEAD
    log_sums += (image * HEADS + head) * TOKENS
    deltas += (image * HEADS + head) * TOKENS
    k_rows = read_rows(k, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
    v_rows = read_rows(v, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)

    full: tl.constexpr = TOKENS // QUERIES * QUERIES
    dk_rows = tl.zeros([KEYS, CHANNELS], tl.float32)
    dv_rows = tl.zeros([KEYS, CHANNELS], tl.float32)
    for first in range(0, full, QUERIES):
        dk_rows, dv_rows = _key_step(
            dk_rows, dv_rows, q, dout, k_rows, v_rows, log_phi, log_sums, deltas, key, first,
            QUERIES, False, (PHI_QUERY, PHI_KEY), HEADS,
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    if REST:
        dk_rows, dv_rows = _key_step(
            dk_rows, dv_rows, q, dout, k_rows, v_rows, log_phi, log_sums, deltas, key, full,
            REST, True, (PHI_QUERY, PHI_KEY), HEADS,
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    write_rows(dk, dk_rows * SCALE, key, 3 * HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)
    write_rows(dv, dv_rows, key, 3 * HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)


@triton.jit
def phi_gradient(
    qkv, log_phi, log_sums, dout, deltas, sums, images, groups,
    PHI_HEAD: tl.constexpr, PHI_QUERY: tl.constexpr, PHI_KEY: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one head: the gradient of log Φp summed over one of ``groups`` groups of images, into (groups, heads, N, N)."""
    columns: tl.constexpr = (TOKENS + KEYS - 1) // KEYS
    tiles: tl.constexpr = (TOKENS + QUERIES - 1) // QUERIES * columns
    place = tl.program_id(0)
    head = place // tiles % HEADS
    group = place // (tiles * HEADS)
    query = place % tiles // columns * QUERIES + tl.arange(0, QUERIES)
    key = place % columns * KEYS + tl.arange(0, KEYS)
    query_token, key_token = tl.minimum(query, TOKENS - 1), tl.minimum(key, TOKENS - 1)
    # Read once for all images.
    prior = log2_phi(log_phi + head * PHI_HEAD, query[:, None], key[None, :], PHI_QUERY, PHI_KEY, TOKENS, True)
    in_group = (images + groups - 1) // groups
    image = (group * in_group).to(tl.int64)  # the first
    q, k, v = parts(qkv, image, head, HEADS, TOKENS, WIDTH)
    dout += (image * TOKENS * HEADS + head) * WIDTH  # (B, N, heads, width)
    log_sums += (image * HEADS + head) * TOKENS
    deltas += (image * HEADS + head) * TOKENS

    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for _ in range(group * in_group, tl.minimum((group + 1) * in_group, images)):
        q_rows = read_rows(q, query_token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
        k_rows = read_rows(k, key_token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
        scores = product(q_rows, tl.trans(k_rows), None, PRECISION) * (SCALE * LOG2E) + prior
        weights = tl.exp2(scores - tl.load(log_sums + query_token)[:, None])
        d_rows = read_rows(dout, query_token, HEADS * WIDTH, WIDTH, CHANNELS)
        v_rows = read_rows(v, key_token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)
        dweights = product(d_rows, tl.trans(v_rows), None, PRECISION)
        total += weights * (dweights - tl.load(deltas + query_token)[:, None])
        q += TOKENS * 3 * HEADS * WIDTH
        k += TOKENS * 3 * HEADS * WIDTH
        v += TOKENS * 3 * HEADS * WIDTH
        dout += TOKENS * HEADS * WIDTH
        log_sums += HEADS * TOKENS
        deltas += HEADS * TOKENS
    sums += (group * HEADS + head).to(tl.int64) * TOKENS * TOKENS
    inside = (query[:, None] < TOKENS) & (key[None, :] < TOKENS)
    tl.store(sums + query[:, None] * TOKENS + key[None, :], total, mask=inside)
