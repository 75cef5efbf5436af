"""Triton code of the gradients of peripheral attention; :mod:`pipeline.kernels.tiles` explains how tiles are read and written."""

from __future__ import annotations

import triton
import triton.language as tl

from pipeline.kernels.tiles import LOG2E, log2_phi, product, read_rows, rounded, write_rows


@triton.jit
def _query_step(
    dq, q, dout, k, v, log_phi, log_sum, delta, query, first,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PHI: tl.constexpr,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (queries, CHANNELS), still without the scale, plus what a block of keys gives."""
    key = first + tl.arange(0, BLOCK)
    token = tl.minimum(key, TOKENS - 1) if MASKED else key
    k_rows = read_rows(k, token, K[0], K[1], WIDTH, CHANNELS)
    v_rows = read_rows(v, token, V[0], V[1], WIDTH, CHANNELS)
    scores = product(q, tl.trans(k_rows), None, PRECISION) * (SCALE * LOG2E)
    scores += log2_phi(log_phi, query[:, None], key[None, :], PHI[0], PHI[1], TOKENS, MASKED)
    weights = tl.exp2(scores - log_sum[:, None])
    dweights = product(dout, tl.trans(v_rows), None, PRECISION)
    dscores = weights * (dweights - delta[:, None])
    return product(rounded(dscores, k_rows.dtype), k_rows, dq, PRECISION)


@triton.jit
def query_gradient(
    q, k, v, log_phi, out, log_sums, dout, dq, deltas,
    Q_IMAGE: tl.constexpr, Q_HEAD: tl.constexpr, Q_TOKEN: tl.constexpr, Q_CHANNEL: tl.constexpr,
    K_IMAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHANNEL: tl.constexpr,
    V_IMAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_CHANNEL: tl.constexpr,
    D_IMAGE: tl.constexpr, D_HEAD: tl.constexpr, D_TOKEN: tl.constexpr, D_CHANNEL: tl.constexpr,
    PHI_HEAD: tl.constexpr, PHI_QUERY: tl.constexpr, PHI_KEY: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head of one image: its rows of ``dq``, and ``deltas``, the sums of dout * out of each row,
    which the other gradients need too."""
    blocks: tl.constexpr = (TOKENS + QUERIES - 1) // QUERIES
    place = tl.program_id(0)
    head = place // blocks % HEADS
    image = (place // (blocks * HEADS)).to(tl.int64)
    query = place % blocks * QUERIES + tl.arange(0, QUERIES)
    token = tl.minimum(query, TOKENS - 1)
    k += image * K_IMAGE + head * K_HEAD
    v += image * V_IMAGE + head * V_HEAD
    log_phi += head * PHI_HEAD
    packed = (image * TOKENS * HEADS + head) * WIDTH  # of a head in (B, N, heads, width)
    row = (image * HEADS + head) * TOKENS  # of a head in (B, heads, N)
    q_rows = read_rows(q + image * Q_IMAGE + head * Q_HEAD, token, Q_TOKEN, Q_CHANNEL, WIDTH, CHANNELS)
    d_rows = read_rows(dout + image * D_IMAGE + head * D_HEAD, token, D_TOKEN, D_CHANNEL, WIDTH, CHANNELS)
    out_rows = read_rows(out + packed, token, HEADS * WIDTH, 1, WIDTH, CHANNELS)
    delta = tl.sum(d_rows.to(tl.float32) * out_rows.to(tl.float32), 1)
    tl.store(deltas + row + query, delta, mask=query < TOKENS)
    log_sum = tl.load(log_sums + row + token)

    full: tl.constexpr = TOKENS // KEYS * KEYS
    result = tl.zeros([QUERIES, CHANNELS], tl.float32)
    for first in range(0, full, KEYS):
        result = _query_step(
            result, q_rows, d_rows, k, v, log_phi, log_sum, delta, token, first,
            KEYS, False, (K_TOKEN, K_CHANNEL), (V_TOKEN, V_CHANNEL), (PHI_QUERY, PHI_KEY),
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    if REST:
        result = _query_step(
            result, q_rows, d_rows, k, v, log_phi, log_sum, delta, token, full,
            REST, True, (K_TOKEN, K_CHANNEL), (V_TOKEN, V_CHANNEL), (PHI_QUERY, PHI_KEY),
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    write_rows(dq + packed, result * SCALE, query, HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)


@triton.jit
def _key_step(
    dk, dv, q, dout, k, v, log_phi, log_sums, deltas, key, first,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, Q: tl.constexpr, D: tl.constexpr, PHI: tl.constexpr,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (keys, CHANNELS), dk still without the scale, plus what a block of queries gives. Tiles are (keys, queries)."""
    query = first + tl.arange(0, BLOCK)
    token = tl.minimum(query, TOKENS - 1) if MASKED else query
    q_rows = read_rows(q, token, Q[0], Q[1], WIDTH, CHANNELS)
    d_rows = read_rows(dout, token, D[0], D[1], WIDTH, CHANNELS)
    scores = product(k, tl.trans(q_rows), None, PRECISION) * (SCALE * LOG2E)
    scores += log2_phi(log_phi, query[None, :], key[:, None], PHI[0], PHI[1], TOKENS, MASKED)
    weights = tl.exp2(scores - tl.load(log_sums + token)[None, :])
    dv = product(rounded(weights, d_rows.dtype), d_rows, dv, PRECISION)
    dweights = product(v, tl.trans(d_rows), None, PRECISION)
    dscores = weights * (dweights - tl.load(deltas + token)[None, :])
    return product(rounded(dscores, q_rows.dtype), q_rows, dk, PRECISION), dv


@triton.jit
def key_value_gradient(
    q, k, v, log_phi, log_sums, dout, deltas, dk, dv,
    Q_IMAGE: tl.constexpr, Q_HEAD: tl.constexpr, Q_TOKEN: tl.constexpr, Q_CHANNEL: tl.constexpr,
    K_IMAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHANNEL: tl.constexpr,
    V_IMAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_CHANNEL: tl.constexpr,
    D_IMAGE: tl.constexpr, D_HEAD: tl.constexpr, D_TOKEN: tl.constexpr, D_CHANNEL: tl.constexpr,
    PHI_HEAD: tl.constexpr, PHI_QUERY: tl.constexpr, PHI_KEY: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head of one image: its rows of ``dk`` and ``dv``."""
    blocks: tl.constexpr = (TOKENS + KEYS - 1) // KEYS
    place = tl.program_id(0)
    head = place // blocks % HEADS
    image = (place // (blocks * HEADS)).to(tl.int64)
    key = place % blocks * KEYS + tl.arange(0, KEYS)
    token = tl.minimum(key, TOKENS - 1)
    q += image * Q_IMAGE + head * Q_HEAD
    dout += image * D_IMAGE + head * D_HEAD
    log_phi += head * PHI_HEAD
    log_sums += (image * HEADS + head) * TOKENS
    deltas += (image * HEADS + head) * TOKENS
    k_rows = read_rows(k + image * K_IMAGE + head * K_HEAD, token, K_TOKEN, K_CHANNEL, WIDTH, CHANNELS)
    v_rows = read_rows(v + image * V_IMAGE + head * V_HEAD, token, V_TOKEN, V_CHANNEL, WIDTH, CHANNELS)

    full: tl.constexpr = TOKENS // QUERIES * QUERIES
    dk_rows = tl.zeros([KEYS, CHANNELS], tl.float32)
    dv_rows = tl.zeros([KEYS, CHANNELS], tl.float32)
    for first in range(0, full, QUERIES):
        dk_rows, dv_rows = _key_step(
            dk_rows, dv_rows, q, dout, k_rows, v_rows, log_phi, log_sums, deltas, token, first,
            QUERIES, False, (Q_TOKEN, Q_CHANNEL), (D_TOKEN, D_CHANNEL), (PHI_QUERY, PHI_KEY),
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    if REST:
        dk_rows, dv_rows = _key_step(
            dk_rows, dv_rows, q, dout, k_rows, v_rows, log_phi, log_sums, deltas, token, full,
            REST, True, (Q_TOKEN, Q_CHANNEL), (D_TOKEN, D_CHANNEL), (PHI_QUERY, PHI_KEY),
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    packed = (image * TOKENS * HEADS + head) * WIDTH  # of a head in (B, N, heads, width)
    write_rows(dk + packed, dk_rows * SCALE, key, HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)
    write_rows(dv + packed, dv_rows, key, HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)


@triton.jit
def phi_gradient(
    q, k, v, log_phi, log_sums, dout, deltas, sums, images, groups,
    Q_IMAGE: tl.constexpr, Q_HEAD: tl.constexpr, Q_TOKEN: tl.constexpr, Q_CHANNEL: tl.constexpr,
    K_IMAGE: tl.constexpr, K_HEAD: tl.constexpr, K_TOKEN: tl.constexpr, K_CHANNEL: tl.constexpr,
    V_IMAGE: tl.constexpr, V_HEAD: tl.constexpr, V_TOKEN: tl.constexpr, V_CHANNEL: tl.constexpr,
    D_IMAGE: tl.constexpr, D_HEAD: tl.constexpr, D_TOKEN: tl.constexpr, D_CHANNEL: tl.constexpr,
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
    prior = log2_phi(
        log_phi + head * PHI_HEAD, query_token[:, None], key_token[None, :], PHI_QUERY, PHI_KEY, TOKENS, False
    )  # read once for all images
    in_group = (images + groups - 1) // groups
    image = (group * in_group).to(tl.int64)  # the first
    q += image * Q_IMAGE + head * Q_HEAD
    k += image * K_IMAGE + head * K_HEAD
    v += image * V_IMAGE + head * V_HEAD
    dout += image * D_IMAGE + head * D_HEAD
    log_sums += (image * HEADS + head) * TOKENS
    deltas += (image * HEADS + head) * TOKENS

    total = tl.zeros([QUERIES, KEYS], tl.float32)
    for _ in range(group * in_group, tl.minimum((group + 1) * in_group, images)):
        q_rows = read_rows(q, query_token, Q_TOKEN, Q_CHANNEL, WIDTH, CHANNELS)
        k_rows = read_rows(k, key_token, K_TOKEN, K_CHANNEL, WIDTH, CHANNELS)
        scores = product(q_rows, tl.trans(k_rows), None, PRECISION) * (SCALE * LOG2E) + prior
        weights = tl.exp2(scores - tl.load(log_sums + query_token)[:, None])
        d_rows = read_rows(dout, query_token, D_TOKEN, D_CHANNEL, WIDTH, CHANNELS)
        v_rows = read_rows(v, key_token, V_TOKEN, V_CHANNEL, WIDTH, CHANNELS)
        dweights = product(d_rows, tl.trans(v_rows), None, PRECISION)
        total += weights * (dweights - tl.load(deltas + query_token)[:, None])
        q += Q_IMAGE
        k += K_IMAGE
        v += V_IMAGE
        dout += D_IMAGE
        log_sums += HEADS * TOKENS
        deltas += HEADS * TOKENS
    sums += (group * HEADS + head).to(tl.int64) * TOKENS * TOKENS
    inside = (query[:, None] < TOKENS) & (key[None, :] < TOKENS)
    tl.store(sums + query[:, None] * TOKENS + key[None, :], total, mask=inside)
