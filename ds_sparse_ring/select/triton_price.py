"""Triton: selection by price: columns, and what the other keys leave for block diagonals. Shapes as in `triton_probe`."""

import triton
import triton.language as tl

from ds_sparse_ring.select.triton_fields import (
    GROUP_FIELDS,
    LOCAL_BEGIN,
    ROW_COUNT,
    ROW_FIRST,
    SEGMENT_FIELDS,
    SEGMENT_REACH,
    SEGMENT_SLOT,
    SINK_CUT,
    SINK_END,
    SLOT,
    TARGET,
    TILES,
)
from ds_sparse_ring.select.triton_probe import key_tile, lse_of_rows, probabilities, row_tile


@triton.jit
def _price_sums(q, k_tile, lse, u, j, straddles, scale2):
    """Per key, sums over rows of p, of p max(j - u, 0), of p (j - u), and of p max(u - j - 64, 0)."""
    p = probabilities(q, k_tile, lse, scale2)
    lag = j[:, None] - u[None, :]
    beyond = tl.zeros([64], tl.float32)
    if straddles:
        beyond = tl.sum(p * tl.maximum(-lag - 64.0, 0.0), 1)
    return tl.sum(p, 1), tl.sum(p * tl.maximum(lag, 0.0), 1), tl.sum(p * lag, 1), beyond


@triton.jit
def _pattern_price_sums(
    q, k_tile, lse, near, u, j, straddles, q_rows, row_lse, head, g, G, scale2,
    HPP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`_price_sums` of all heads of a pattern, without rows that are near the keys; the rows of the first heads are at hand."""
    hidden = tl.where(near, float("inf"), row_lse)
    mass, before, lag, beyond = _price_sums(q, k_tile, hidden, u, j, straddles, scale2)
    for more in range(HEADS, HPP, HEADS):
        other = row_tile(q_rows, head + more, g, G, 64 * HEADS, D, BLOCK_D)
        hidden = tl.where(near, float("inf"), lse_of_rows(lse, head + more, g, G, 64 * HEADS))
        a, b, d, e = _price_sums(other, k_tile, hidden, u, j, straddles, scale2)
        mass += a
        before += b
        lag += d
        beyond += e
    return mass, before, lag, beyond


@triton.jit
def _token_word(on, j):
    """A word whose bit j is set where ``on`` is."""
    return tl.sum(tl.where(on, tl.full([64], 1, tl.int64) << j.to(tl.int64), 0), 0)


@triton.jit
def _diagonal_parts(left, mass, before, lag, beyond):
    """What the keys of ``left`` leave for block diagonals, [2, 2]: before, centre; after, beyond. From `_price_sums`."""
    before, beyond = before * 0.015625, beyond * 0.015625
    after = before - lag * 0.015625 - 2.0 * beyond
    centre = mass - before - after - beyond
    parts = tl.join(tl.join(before, after), tl.join(centre, beyond))
    return tl.sum(tl.where(left[:, None, None], parts, 0.0), 0)


@triton.jit
def price_kernel(
    q_rows,  # [H, G * R, D]
    k,  # [K, n, D]
    lse,  # fp32 [H, G * R], +inf for rows that do not exist
    groups,
    chunks,
    key_blocks,
    words,  # int64 [W]: bit t is set if token t of the block is a column
    partials,  # fp32 [W, 4]: mass left for four neighbouring block diagonals
    needed,  # int8, one per slot of a diagonal: `needed_kernel`
    segments,
    k_head_stride,
    k_stride,
    scale2,
    price,
    local_blocks,
    G,
    P,
    GROUP: tl.constexpr,
    HPP: tl.constexpr,
    HEADS: tl.constexpr,  # heads scored at a time; divides HPP
    SKIP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Columns above the price, and what the others leave for the diagonals. Grid: C * P, patterns fastest.

    Row u (counted from the beginning of the rows' first block) and key j of a block that lies c blocks before it are on the
    token diagonal 64 c + u - j. It gives block diagonal d the share max(0, 1 - |64 (c - d) + u - j| / 64), where d is one of
    c - 1 ... c + 2 (before, centre, after, beyond; the last one only where the rows straddle two blocks). These shares add up
    to 1, and weighted with d - c to (u - j) / 64, so that two of the four sums give the others.
    """
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P
    pattern = pid % P
    g = tl.load(chunks + c * 3)
    group = groups + g * GROUP_FIELDS
    if tl.load(group + TARGET) >= 0:
        first = tl.load(group + ROW_FIRST)
        count = tl.load(group + ROW_COUNT)
        sink_cut = tl.load(group + SINK_CUT)
        sink_end = tl.load(group + SINK_END)
        slot = tl.load(group + SLOT) * P + pattern * tl.load(group + TILES) - tl.load(group + LOCAL_BEGIN)
        row_block = first // 64
        straddles = (first + count - 1) // 64 > row_block
        rows = (count * HPP).to(tl.float32)
        j = tl.arange(0, 64)
        u = (first % 64).to(tl.int32) + tl.arange(0, 64 * HEADS) % 64
        four = tl.arange(0, 2)
        head = pattern * HPP
        k_head = k + head // GROUP * k_head_stride
        begin = tl.load(chunks + c * 3 + 1)
        q = row_tile(q_rows, head, g, G, 64 * HEADS, D, BLOCK_D)
        row_lse = lse_of_rows(lse, head, g, G, 64 * HEADS)
        segment = segments + tl.load(group + TARGET) * SEGMENT_FIELDS
        needed += tl.load(segment + SEGMENT_SLOT) * P + pattern * tl.load(segment + SEGMENT_REACH)
        for local in range(begin, tl.load(chunks + c * 3 + 2)):
            block = tl.load(key_blocks + local)
            token = block * 64 + j
            at = partials + (slot + local) * 4 + four[:, None] * 2 + four[None, :]
            wanted = True
            if SKIP:
                offset = tl.maximum(row_block - block, 0)
                wanted = (tl.load(needed + offset) != 0) | (block >= row_block)
            if wanted:
                tile = key_tile(k_head, k_stride, local, D, BLOCK_D)
                near = (u // 64 + (row_block - block).to(tl.int32)) < local_blocks  # holds for every key in the future
                # the same amount is added to u and j: their differences, 64 x rows numbers, are then no constants of the loop,
                # which would be kept in registers
                moved = ((local - begin) * 64).to(tl.float32)
                u_moved = u.to(tl.float32) + moved
                j_moved = j.to(tl.float32) + moved
                mass, before, lag, beyond = _pattern_price_sums(
                    q, tile, lse, near, u_moved, j_moved, straddles, q_rows, row_lse, head, g, G, scale2, HPP, HEADS, D, BLOCK_D
                )
                mass = tl.where(token >= sink_cut, mass, 0.0)
                taken = mass > price * rows
                left = (token >= sink_cut) & (mass <= price * rows)
                tl.store(words + slot + local, _token_word(taken | (token < sink_end), j))
                tl.store(at, _diagonal_parts(left, mass, before, lag, beyond) / rows)
            else:
                tl.store(words + slot + local, _token_word(token < sink_end, j))
                tl.store(at, tl.zeros([2, 2], tl.float32))
