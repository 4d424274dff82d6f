"""Triton: block diagonals: bounds and sums of their masses over key blocks, and which of them are on.

A program takes `tables.DIAGONAL_TILE` offsets of one segment and pattern. Shapes as in `triton_probe`.
"""

import triton
import triton.language as tl

from ds_sparse_ring.select.triton_fields import (
    DIAGONAL_TILE,
    DOCUMENT_BEGIN,
    FORCED,
    GROUP_FIELDS,
    KEY_END,
    LOCAL_BEGIN,
    REACH,
    REACH_SLOT,
    ROW_COUNT,
    ROW_FIRST,
    SEGMENT_FIELDS,
    SEGMENT_REACH,
    SEGMENT_SLOT,
    SLOT,
    SOURCE,
    TILES,
)


@triton.jit
def _own_tile(segments, tiles, P):
    """Of the program: its pattern, row of ``segments``, and how many diagonals that has; its offsets; the slot of offset 0."""
    pid = tl.program_id(0).to(tl.int64)
    tile = tiles + pid // P * 2
    segment = segments + tl.load(tile) * SEGMENT_FIELDS
    reach = tl.load(segment + SEGMENT_REACH)
    pattern = pid % P
    first = tl.load(segment + SEGMENT_SLOT) * P + pattern * reach
    return pattern, segment, reach, tl.load(tile + 1) + tl.arange(0, DIAGONAL_TILE), first


@triton.jit
def bound_kernel(
    bounds,  # fp32: `lse_chunk_kernel`
    anchors,  # fp32 [H, G * R]
    lse,  # fp32 [H, G * R]
    groups,
    segments,
    tiles,
    local_of,
    out,  # fp32, one per slot of a diagonal
    G,
    P,
    HPP: tl.constexpr,
):
    """At most how much mass the block at each offset before the rows' first one has. Grid: tiles * P, patterns fastest."""
    pattern, segment, reach, offset, first = _own_tile(segments, tiles, P)
    total = tl.zeros([DIAGONAL_TILE], tl.float32)
    source = tl.load(segment + SOURCE)
    if source >= 0:
        group = groups + source * GROUP_FIELDS
        block = tl.load(group + ROW_FIRST) // 64 - offset
        local = tl.load(local_of + block, mask=block >= tl.load(group + DOCUMENT_BEGIN), other=-1)
        row = source * 64 + tl.arange(0, 64)
        for h in range(HPP):
            head = pattern * HPP + h
            # rows that do not exist: inf - inf
            lift = tl.load(anchors + head * G * 64 + row) - tl.load(lse + head * G * 64 + row)
            lift = tl.max(tl.where(lift == lift, tl.exp2(lift), 0.0), 0)
            lift = tl.maximum(lift, 1e-30)  # still a bound; 0 would hide a sum that overflowed
            at = tl.load(group + SLOT) * P * HPP + head * tl.load(group + TILES) - tl.load(group + LOCAL_BEGIN)
            total += tl.load(bounds + at + local, mask=local >= 0, other=0.0) * lift
        total = total / (tl.load(group + ROW_COUNT) * HPP).to(tl.float32)
    tl.store(out + first + offset, total, mask=offset < reach)


@triton.jit
def needed_kernel(bounds, segments, tiles, needed, price, P):
    """Which key blocks must be scored again. Grid: tiles * P, patterns fastest.

    A block whose mass is below the price holds no column; if four neighbours together, itself among them, are below that of a
    diagonal, none of them gives rise to one. The bounds are lowered by 1 % against rounding.
    """
    _, _, reach, offset, first = _own_tile(segments, tiles, P)
    around = tl.zeros([DIAGONAL_TILE], tl.float32)
    for step in tl.static_range(7):
        near = offset + (step - 3)
        around += tl.load(bounds + first + near, mask=(near >= 0) & (near < reach), other=0.0)
    own = tl.load(bounds + first + offset, mask=offset < reach, other=0.0)
    little = (own <= 0.99 * price) & (around <= 0.99 * 64 * price)
    tl.store(needed + first + offset, tl.where(little, 0, 1).to(tl.int8), mask=offset < reach)  # NaN is needed, too


@triton.jit
def diagonal_mass_kernel(
    partials,  # fp32 [W, 4]
    groups,
    segments,
    tiles,  # [tiles, 2] segment, first offset
    local_of,
    mass,  # fp32, one per slot of a diagonal
    P,
):
    """Mass of block diagonals over this rank's keys: four parts each, added in order. Grid: tiles * P, patterns fastest."""
    pattern, segment, reach, offset, first = _own_tile(segments, tiles, P)
    total = tl.zeros([DIAGONAL_TILE], tl.float32)
    source = tl.load(segment + SOURCE)
    if source >= 0:
        group = groups + source * GROUP_FIELDS
        slot = tl.load(group + SLOT) * P + pattern * tl.load(group + TILES) - tl.load(group + LOCAL_BEGIN)
        row_block = tl.load(group + ROW_FIRST) // 64
        document_begin = tl.load(group + DOCUMENT_BEGIN)
        key_end = tl.load(group + KEY_END)
        for part in tl.static_range(4):
            block = row_block - offset - 1 + part
            there = (block >= document_begin) & (block < key_end)
            local = tl.load(local_of + block, mask=there, other=-1)
            total += tl.load(partials + (slot + local) * 4 + part, mask=local >= 0, other=0.0)
    tl.store(mass + first + offset, total, mask=offset < reach)


@triton.jit
def diagonal_flag_kernel(
    mass,  # fp32, one per slot of a diagonal; with WORDS: int64 words of token offsets
    groups,
    segments,
    tiles,
    flags,  # int64, a zero and one per slot of a diagonal
    threshold,
    P,
    WORDS: tl.constexpr,
):
    """Which block diagonals are on. Grid: tiles * P, patterns fastest.

    WORDS: a token offset 64 a + r that was chosen keeps the block diagonals a and, for r > 0, a + 1.
    """
    pattern, segment, reach, offset, first = _own_tile(segments, tiles, P)
    on = offset < tl.load(segment + FORCED)
    if WORDS:
        source = tl.load(segment + SOURCE)
        if source >= 0:
            group = groups + source * GROUP_FIELDS
            probed = tl.load(group + REACH)
            words = mass + tl.load(group + REACH_SLOT) * P + pattern * probed
            own = tl.load(words + offset, mask=offset < probed, other=0)
            nearer = tl.load(words + offset - 1, mask=(offset > 0) & (offset <= probed), other=0)
            on = on | (own != 0) | ((nearer & -2) != 0)
    else:
        on = on | (tl.load(mass + first + offset, mask=offset < reach, other=0.0) > threshold)
    tl.store(flags + 1 + first + offset, on.to(tl.int64), mask=offset < reach)
    tl.store(flags, tl.zeros([], tl.int64), mask=tl.program_id(0) == 0)
