"""Triton code of peripheral attention, softmax(q kᵀ / sqrt(width) + log Φp) v, in tiles of queries by keys; and what its gradients
share with it (:mod:`pipeline.kernels.gradient_tiles`).

The forward pass keeps the logarithm of each row's sum, from which the backward pass computes the weights again (Dao,
"FlashAttention-2", ICLR 2024, Algorithms 1 and 2). Scores are kept in base 2, for which GPUs have an instruction. Every number is
written by one program and added up in a fixed order, so that repeated runs agree bit for bit.

Queries, keys and values are one tensor (B, N, 3, HEADS, WIDTH), as a projection writes them, and so are their gradients: the
projection's backward pass needs no copy. All sizes are compile-time constants: the compiler then knows how far addresses are aligned.
Channels from ``WIDTH`` on are masked. Loads of tokens past the end read the last token again, which needs no mask; such keys get a
score of -inf, and nothing of such queries is written. A query whose scores are all -inf gets zeros, as from PyTorch's attention.

Tokens are seldom a multiple of a block (196 = 3 * 64 + 4): after a loop over full blocks comes one of ``REST`` tokens, if any.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """a b + acc in float32; acc None: 0. The interpreter (Triton 3.7) multiplies bfloat16's bits as integers unless it is cast."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision=PRECISION)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 to ``dtype``, to nearest even. The interpreter truncates to bfloat16, so there its bits are rounded first."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(dtype)


@triton.jit
def place_of(BLOCK: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Image and head of a program that keeps a block of tokens; the tokens, and those that it reads: past the end the last one."""
    blocks: tl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    place = tl.program_id(0)
    tokens = place % blocks * BLOCK + tl.arange(0, BLOCK)
    image = (place // (blocks * HEADS)).to(tl.int64)  # an offset may exceed 32 bits
    return image, place // blocks % HEADS, tokens, tl.minimum(tokens, TOKENS - 1)


@triton.jit
def parts(qkv, image, head, HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Where q, k and v, or their gradients, of a head of an image begin in (B, N, 3, HEADS, WIDTH)."""
    q = qkv + (image * (TOKENS * 3 * HEADS) + head) * WIDTH
    return q, q + HEADS * WIDTH, q + 2 * HEADS * WIDTH


@triton.jit
def read_rows(base, token, TOKEN: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows of q, k, v or a gradient, TOKEN numbers apart: (tokens, CHANNELS), zero from WIDTH on."""
    channel = tl.arange(0, CHANNELS)
    pointers = base + token[:, None] * TOKEN + channel[None, :]
    if WIDTH == CHANNELS:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=channel[None, :] < WIDTH, other=0.0)
    return values


@triton.jit
def write_rows(base, rows, token, TOKEN: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Store (tokens, CHANNELS) into rows that are TOKEN numbers apart, less what is past TOKENS and WIDTH."""
    channel = tl.arange(0, CHANNELS)
    inside = (token[:, None] < TOKENS) & (channel[None, :] < WIDTH)
    tl.store(base + token[:, None] * TOKEN + channel[None, :], rounded(rows, base.dtype.element_ty), mask=inside)


@triton.jit
def log2_phi(base, query, key, QUERY: tl.constexpr, KEY: tl.constexpr, TOKENS: tl.constexpr, MASKED: tl.constexpr):
    """log2 Φp at two index tensors that broadcast to a tile; -inf past the end, which only a MASKED tile has."""
    pointers = base + query * QUERY + key * KEY
    if MASKED:
        values = tl.load(pointers, mask=(query < TOKENS) & (key < TOKENS), other=float("-inf"))
    else:
        values = tl.load(pointers)
    return values.to(tl.float32) * LOG2E


@triton.jit
def _attend(
    state, q, k, v, log_phi, query, first,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, TOKEN: tl.constexpr, PHI: tl.constexpr,
    SCALE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys to the running softmax: weighted sum (queries, CHANNELS), row maximum and row sum (queries,)."""
    result, peak, total = state
    key = first + tl.arange(0, BLOCK)
    token = tl.minimum(key, TOKENS - 1) if MASKED else key
    k_rows = read_rows(k, token, TOKEN, WIDTH, CHANNELS)
    scores = product(q, tl.trans(k_rows), None, PRECISION) * (SCALE * LOG2E)
    scores += log2_phi(log_phi, query[:, None], key[None, :], PHI[0], PHI[1], TOKENS, MASKED)
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf is not a number
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    v_rows = read_rows(v, token, TOKEN, WIDTH, CHANNELS)
    result = product(rounded(weights, v_rows.dtype), v_rows, result * shrink[:, None], PRECISION)
    return result, higher, total * shrink + tl.sum(weights, 1)


@triton.jit
def forward(
    qkv, log_phi, out, log_sums,
    PHI_HEAD: tl.constexpr, PHI_QUERY: tl.constexpr, PHI_KEY: tl.constexpr,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SCALE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head of one image: its rows of ``out`` and ``log_sums``."""
    image, head, query, token = place_of(QUERIES, HEADS, TOKENS)
    q, k, v = parts(qkv, image, head, HEADS, TOKENS, WIDTH)
    log_phi += head * PHI_HEAD
    q_rows = read_rows(q, token, 3 * HEADS * WIDTH, WIDTH, CHANNELS)

    full: tl.constexpr = TOKENS // KEYS * KEYS
    state = (
        tl.zeros([QUERIES, CHANNELS], tl.float32),
        tl.full([QUERIES], float("-inf"), tl.float32),
        tl.zeros([QUERIES], tl.float32),
    )
    for first in range(0, full, KEYS):
        state = _attend(
            state, q_rows, k, v, log_phi, token, first,
            KEYS, False, 3 * HEADS * WIDTH, (PHI_QUERY, PHI_KEY),
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    if REST:
        state = _attend(
            state, q_rows, k, v, log_phi, token, full,
            REST, True, 3 * HEADS * WIDTH, (PHI_QUERY, PHI_KEY),
            SCALE, TOKENS, WIDTH, CHANNELS, PRECISION,
        )  # fmt: skip
    result, peak, total = state
    out += (image * TOKENS * HEADS + head) * WIDTH  # (B, N, heads, width)
    none = peak == float("-inf")  # of a query's scores is a number
    total = tl.where(none, 1.0, total)
    log_sum = tl.where(none, float("inf"), peak + tl.log2(total))  # the gradients' weights are zero too
    write_rows(out, result / total[:, None], query, HEADS * WIDTH, TOKENS, WIDTH, CHANNELS)
    tl.store(log_sums + (image * HEADS + head) * TOKENS + query, log_sum, mask=query < TOKENS)  # (B, heads, N)
