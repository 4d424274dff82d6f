"""Triton kernels over the scores of the probes: tiles of keys and rows, the rows' log-sum-exp, probabilities.

What these are for: masses of keys and diagonals for selection by price (`triton_price`) and by mass (`triton_mass`).

Every kernel covers all segments and heads in one launch. A program takes a chunk of key blocks of one group (see `tables`);
what it finds goes into its own places of the output, and sums over programs are made in a fixed order: no atomics, the same
bits every time. Scores are products in the input's dtype with fp32 sums, in units of log2 (``scale2 = scale * log2(e)``).

``groups`` rows are read by position; `tables` names them. Shapes: H query heads, P patterns of HPP heads, G groups, C chunks,
T = 64 tokens of a block, R = 64 rows of a probe, W slots (blocks of key tokens of all segments and patterns), D head size.
"""

import triton
import triton.language as tl

from ds_sparse_ring.select.triton_fields import EARLIER, GROUP_FIELDS, LOCAL_BEGIN, ROW_FIRST, SLOT, TARGET, TILES


@triton.jit
def key_tile(k_head, k_stride, local, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys of one local block, [T, BLOCK_D]."""
    token = local * 64 + tl.arange(0, 64)  # local is int64
    d = tl.arange(0, BLOCK_D)
    at = k_head + token[:, None] * k_stride + d[None, :]
    if BLOCK_D == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def row_tile(q_rows, head, g, G, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Probe rows of ROWS / 64 heads from ``head`` on, [ROWS, BLOCK_D]."""
    m = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    row = ((head + m // 64) * G + g) * 64 + m % 64  # head is int64
    return tl.load(q_rows + row[:, None] * D + d[None, :], mask=d[None, :] < D, other=0.0)


@triton.jit
def _lse_run(
    largest,
    total,
    anchor,
    bounds,
    bounds_stride,
    target,
    q,
    k_head,
    k_stride,
    key_blocks,
    first,
    last,
    row,
    scale2,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Go on with the maxima and sums of the rows over local blocks [first, last)."""
    for local in range(first, last):
        k = key_tile(k_head, k_stride, local, D, BLOCK_D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        if CAUSAL:
            key = tl.load(key_blocks + local) * 64 + tl.arange(0, 64)
            s = tl.where(key[None, :] <= row[:, None], s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        part = tl.sum(tl.exp2(s - shift[:, None]), 1)
        total = total * tl.exp2(largest - shift) + part
        largest = new
        if BOUND:
            bound = tl.sum(tl.reshape(part * tl.exp2(shift - anchor), [HEADS, 64]), 1)
            h = tl.arange(0, HEADS)
            tl.store(bounds + local + h * bounds_stride, bound, mask=target + 0 * h >= 0)
    return largest, total


@triton.jit
def lse_chunk_kernel(
    q_rows,  # [H, G * R, D]
    k,  # [K, n, D]
    groups,
    chunks,
    key_blocks,
    largest_out,  # fp32 [C, H, R]
    total_out,  # fp32 [C, H, R]: sums of exponentials relative to the maxima
    anchors,  # fp32 [H, G * R]: a lower bound of the log-sum-exp, +inf for rows that do not exist
    bounds,  # fp32, one per key block of each (group, head): what its keys sum to over the rows, relative to the anchors
    k_head_stride,
    k_stride,
    scale2,
    G,
    H,
    GROUP: tl.constexpr,  # query heads per KV head
    HEADS: tl.constexpr,  # query heads of a program; divides GROUP
    BOUND: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Log-sum-exp of the rows over one chunk of keys, for HEADS heads. Grid: C * H / HEADS, heads fastest."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // (H // HEADS)
    head = pid % (H // HEADS) * HEADS
    g = tl.load(chunks + c * 3)
    first = tl.load(chunks + c * 3 + 1)
    last = tl.load(chunks + c * 3 + 2)
    group = groups + g * GROUP_FIELDS
    earlier = tl.load(group + LOCAL_BEGIN) + tl.load(group + EARLIER)
    middle = tl.minimum(tl.maximum(earlier, first), last)
    m = tl.arange(0, 64 * HEADS)
    row = tl.load(group + ROW_FIRST) + m % 64
    q = row_tile(q_rows, head, g, G, 64 * HEADS, D, BLOCK_D)
    k_head = k + head // GROUP * k_head_stride
    largest = tl.full([64 * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([64 * HEADS], tl.float32)
    anchor = largest
    target = tl.load(group + TARGET)  # without one, there is no room for bounds
    tiles = tl.load(group + TILES)
    if BOUND:
        anchor = tl.load(anchors + ((head + m // 64) * G + g) * 64 + m % 64)
        bounds += tl.load(group + SLOT) * H + head * tiles - tl.load(group + LOCAL_BEGIN)
    largest, total = _lse_run(
        largest, total, anchor, bounds, tiles, target, q, k_head, k_stride, key_blocks, first, middle, row, scale2,
        HEADS, D, BLOCK_D, False, BOUND,
    )  # fmt: skip
    largest, total = _lse_run(
        largest, total, anchor, bounds, tiles, target, q, k_head, k_stride, key_blocks, middle, last, row, scale2,
        HEADS, D, BLOCK_D, True, BOUND,
    )  # fmt: skip
    at = (c * H + head) * 64 + m
    tl.store(largest_out + at, largest)
    tl.store(total_out + at, total)


@triton.jit
def lse_merge_kernel(
    largest_parts,  # fp32 [C, H, R]
    total_parts,  # fp32 [C, H, R]
    groups,
    largest_out,  # fp32 [H, G * R]
    total_out,  # fp32 [H, G * R]
    G,
    H,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Merge the chunks [BEGIN, END) of a group in order. Grid: (G, H)."""
    g = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    begin = tl.load(groups + g * GROUP_FIELDS + BEGIN)
    end = tl.load(groups + g * GROUP_FIELDS + END)
    r = tl.arange(0, 64)
    largest = tl.full([64], float("-inf"), tl.float32)
    total = tl.zeros([64], tl.float32)
    for first in range(begin, end, CHUNKS):
        c = first + tl.arange(0, CHUNKS)
        at = (c[:, None] * H + h) * 64 + r[None, :]
        part = tl.load(largest_parts + at, mask=c[:, None] < end, other=float("-inf"))
        part_total = tl.load(total_parts + at, mask=c[:, None] < end, other=0.0)
        new = tl.maximum(largest, tl.max(part, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp2(largest - shift) + tl.sum(part_total * tl.exp2(part - shift[None, :]), 0)
        largest = new
    at = (h * G + g) * 64 + r
    tl.store(largest_out + at, largest)
    tl.store(total_out + at, total)


@triton.jit(do_not_specialize=["G"])
def lse_kernel(
    largest,  # fp32 [H, G * R]
    total,  # fp32 [H, G * R]
    valid,  # bool [G * R]
    lse,  # fp32 [H, G * R]: +inf for rows that are not valid
    refused,  # int64 [H, G]: 1 if a valid row is not finite
    G,
):
    """Log-sum-exp of rows. Grid: (G, H)."""
    g = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64)
    r = tl.arange(0, 64)
    at = (h * G + g) * 64 + r
    row = tl.load(largest + at) + tl.log2(tl.load(total + at))
    counts = tl.load(valid + g * 64 + r) != 0
    infinite = (row != row) | (tl.abs(row) == float("inf"))
    tl.store(lse + at, tl.where(counts, row, float("inf")))
    tl.store(refused + h * G + g, tl.max((counts & infinite).to(tl.int64), 0))


@triton.jit
def probabilities(q, k_tile, lse, scale2):
    """Probabilities [T keys, rows]: with keys along the first axis, sums over rows stay inside a warp.

    Rows whose lse is +inf get 0. The bound keeps them so where a hidden key (in the future, or padding) scores NaN or inf;
    scores that count were found finite with their log-sum-exp.
    """
    s = tl.dot(k_tile, tl.trans(q), input_precision="ieee") * scale2
    return tl.exp2(tl.minimum(s, 1e30) - lse[None, :])


@triton.jit
def lse_of_rows(lse, head, g, G, ROWS: tl.constexpr):
    """Log-sum-exp of the rows of ROWS / 64 heads."""
    m = tl.arange(0, ROWS)
    return tl.load(lse + ((head + m // 64) * G + g) * 64 + m % 64)
