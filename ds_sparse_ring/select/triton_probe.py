"""Triton kernels over the scores of the probes: their log-sum-exp, and the mass on columns and diagonals.

Every kernel covers all segments and heads in one launch. A program takes a chunk of key blocks of one group (see `tables`);
what it finds goes into its own places of the output, and sums over programs are made in a fixed order: no atomics, the same
bits every time. Scores are products in the input's dtype with fp32 sums, in units of log2 (``scale2 = scale * log2(e)``).

``groups`` rows are read by position; `tables` names them. Shapes: H query heads, P patterns of HPP heads, G groups, C chunks,
T = 64 tokens of a block, R = 64 rows of a probe, W slots (blocks of key tokens of all segments and patterns), D head size.
"""

import triton
import triton.language as tl

from ds_sparse_ring.select import tables

_FIELDS = tl.constexpr(tables.GROUP_FIELDS)
_ROW_FIRST = tl.constexpr(tables.ROW_FIRST)
_ROW_COUNT = tl.constexpr(tables.ROW_COUNT)
_LOCAL_BEGIN = tl.constexpr(tables.LOCAL_BEGIN)
_TILES = tl.constexpr(tables.TILES)
_SLOT = tl.constexpr(tables.SLOT)
_EARLIER = tl.constexpr(tables.EARLIER)
_TARGET = tl.constexpr(tables.TARGET)
_DOCUMENT_BEGIN = tl.constexpr(tables.DOCUMENT_BEGIN)
_KEY_END = tl.constexpr(tables.KEY_END)
_SINK_CUT = tl.constexpr(tables.SINK_CUT)
_SINK_END = tl.constexpr(tables.SINK_END)
_REACH = tl.constexpr(tables.REACH)
_REACH_SLOT = tl.constexpr(tables.REACH_SLOT)
_SEGMENT_FIELDS = tl.constexpr(tables.SEGMENT_FIELDS)
_SOURCE = tl.constexpr(tables.SOURCE)
_FORCED = tl.constexpr(tables.FORCED)
_SEGMENT_REACH = tl.constexpr(tables.SEGMENT_REACH)
_SEGMENT_SLOT = tl.constexpr(tables.SEGMENT_SLOT)
_TILE = tl.constexpr(tables.DIAGONAL_TILE)

UNITS = 52  # token diagonals add up in units of 2**-52: the probabilities of 64 rows stay below 2**63
MEAN = 2.0 ** -(UNITS + 6)  # a 64th of their sum, whether or not a group has 64 rows: only the order within it counts
_UNIT = tl.constexpr(2.0**UNITS)
_MEAN = tl.constexpr(MEAN)


@triton.jit
def _key_tile(k_head, k_stride, local, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys of one local block, [T, BLOCK_D]."""
    token = local * 64 + tl.arange(0, 64)  # local is int64
    d = tl.arange(0, BLOCK_D)
    at = k_head + token[:, None] * k_stride + d[None, :]
    if BLOCK_D == D:
        return tl.load(at)
    else:
        return tl.load(at, mask=d[None, :] < D, other=0.0)


@triton.jit
def _row_tile(q_rows, head, g, G, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
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
        k = _key_tile(k_head, k_stride, local, D, BLOCK_D)
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
    group = groups + g * _FIELDS
    earlier = tl.load(group + _LOCAL_BEGIN) + tl.load(group + _EARLIER)
    middle = tl.minimum(tl.maximum(earlier, first), last)
    m = tl.arange(0, 64 * HEADS)
    row = tl.load(group + _ROW_FIRST) + m % 64
    q = _row_tile(q_rows, head, g, G, 64 * HEADS, D, BLOCK_D)
    k_head = k + head // GROUP * k_head_stride
    largest = tl.full([64 * HEADS], float("-inf"), tl.float32)
    total = tl.zeros([64 * HEADS], tl.float32)
    anchor = largest
    target = tl.load(group + _TARGET)  # without one, there is no room for bounds
    tiles = tl.load(group + _TILES)
    if BOUND:
        anchor = tl.load(anchors + ((head + m // 64) * G + g) * 64 + m % 64)
        bounds += tl.load(group + _SLOT) * H + head * tiles - tl.load(group + _LOCAL_BEGIN)
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
    begin = tl.load(groups + g * _FIELDS + BEGIN)
    end = tl.load(groups + g * _FIELDS + END)
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
def _probabilities(q, k_tile, lse, scale2):
    """Probabilities [T keys, rows]: with keys along the first axis, sums over rows stay inside a warp.

    Rows whose lse is +inf get 0. The bound keeps them so where a hidden key (in the future, or padding) scores NaN or inf;
    scores that count were found finite with their log-sum-exp.
    """
    s = tl.dot(k_tile, tl.trans(q), input_precision="ieee") * scale2
    return tl.exp2(tl.minimum(s, 1e30) - lse[None, :])


@triton.jit
def _row_lse(lse, head, g, G, ROWS: tl.constexpr):
    """Log-sum-exp of the rows of ROWS / 64 heads."""
    m = tl.arange(0, ROWS)
    return tl.load(lse + ((head + m // 64) * G + g) * 64 + m % 64)


@triton.jit
def _price_sums(q, k_tile, lse, u, j, straddles, scale2):
    """Per key, sums over rows of p, of p max(j - u, 0), of p (j - u), and of p max(u - j - 64, 0)."""
    p = _probabilities(q, k_tile, lse, scale2)
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
        other = _row_tile(q_rows, head + more, g, G, 64 * HEADS, D, BLOCK_D)
        hidden = tl.where(near, float("inf"), _row_lse(lse, head + more, g, G, 64 * HEADS))
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
    group = groups + g * _FIELDS
    if tl.load(group + _TARGET) >= 0:
        first = tl.load(group + _ROW_FIRST)
        count = tl.load(group + _ROW_COUNT)
        sink_cut = tl.load(group + _SINK_CUT)
        sink_end = tl.load(group + _SINK_END)
        slot = tl.load(group + _SLOT) * P + pattern * tl.load(group + _TILES) - tl.load(group + _LOCAL_BEGIN)
        row_block = first // 64
        straddles = (first + count - 1) // 64 > row_block
        rows = (count * HPP).to(tl.float32)
        j = tl.arange(0, 64)
        u = (first % 64).to(tl.int32) + tl.arange(0, 64 * HEADS) % 64
        four = tl.arange(0, 2)
        head = pattern * HPP
        k_head = k + head // GROUP * k_head_stride
        begin = tl.load(chunks + c * 3 + 1)
        q = _row_tile(q_rows, head, g, G, 64 * HEADS, D, BLOCK_D)
        row_lse = _row_lse(lse, head, g, G, 64 * HEADS)
        segment = segments + tl.load(group + _TARGET) * _SEGMENT_FIELDS
        needed += tl.load(segment + _SEGMENT_SLOT) * P + pattern * tl.load(segment + _SEGMENT_REACH)
        for local in range(begin, tl.load(chunks + c * 3 + 2)):
            block = tl.load(key_blocks + local)
            token = block * 64 + j
            at = partials + (slot + local) * 4 + four[:, None] * 2 + four[None, :]
            wanted = True
            if SKIP:
                offset = tl.maximum(row_block - block, 0)
                wanted = (tl.load(needed + offset) != 0) | (block >= row_block)
            if wanted:
                tile = _key_tile(k_head, k_stride, local, D, BLOCK_D)
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
    pid = tl.program_id(0).to(tl.int64)
    t = pid // P
    pattern = pid % P
    segment = segments + tl.load(tiles + t * 2) * _SEGMENT_FIELDS
    reach = tl.load(segment + _SEGMENT_REACH)
    offset = tl.load(tiles + t * 2 + 1) + tl.arange(0, _TILE)
    total = tl.zeros([_TILE], tl.float32)
    source = tl.load(segment + _SOURCE)
    if source >= 0:
        group = groups + source * _FIELDS
        block = tl.load(group + _ROW_FIRST) // 64 - offset
        local = tl.load(local_of + block, mask=block >= tl.load(group + _DOCUMENT_BEGIN), other=-1)
        row = source * 64 + tl.arange(0, 64)
        for h in range(HPP):
            head = pattern * HPP + h
            # rows that do not exist: inf - inf
            lift = tl.load(anchors + head * G * 64 + row) - tl.load(lse + head * G * 64 + row)
            lift = tl.max(tl.where(lift == lift, tl.exp2(lift), 0.0), 0)
            lift = tl.maximum(lift, 1e-30)  # still a bound; 0 would hide a sum that overflowed
            at = tl.load(group + _SLOT) * P * HPP + head * tl.load(group + _TILES) - tl.load(group + _LOCAL_BEGIN)
            total += tl.load(bounds + at + local, mask=local >= 0, other=0.0) * lift
        total = total / (tl.load(group + _ROW_COUNT) * HPP).to(tl.float32)
    at = tl.load(segment + _SEGMENT_SLOT) * P + pattern * reach + offset
    tl.store(out + at, total, mask=offset < reach)


@triton.jit
def needed_kernel(bounds, segments, tiles, needed, price, P):
    """Which key blocks must be scored again. Grid: tiles * P, patterns fastest.

    A block whose mass is below the price holds no column; if four neighbours together, itself among them, are below that of a
    diagonal, none of them gives rise to one. The bounds are lowered by 1 % against rounding.
    """
    pid = tl.program_id(0).to(tl.int64)
    t = pid // P
    segment = segments + tl.load(tiles + t * 2) * _SEGMENT_FIELDS
    reach = tl.load(segment + _SEGMENT_REACH)
    offset = tl.load(tiles + t * 2 + 1) + tl.arange(0, _TILE)
    at = tl.load(segment + _SEGMENT_SLOT) * P + pid % P * reach
    around = tl.zeros([_TILE], tl.float32)
    for step in tl.static_range(7):
        near = offset + (step - 3)
        around += tl.load(bounds + at + near, mask=(near >= 0) & (near < reach), other=0.0)
    own = tl.load(bounds + at + offset, mask=offset < reach, other=0.0)
    little = (own <= 0.99 * price) & (around <= 0.99 * 64 * price)
    tl.store(needed + at + offset, tl.where(little, 0, 1).to(tl.int8), mask=offset < reach)  # NaN is needed, too


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
    pid = tl.program_id(0).to(tl.int64)
    t = pid // P
    pattern = pid % P
    segment = segments + tl.load(tiles + t * 2) * _SEGMENT_FIELDS
    reach = tl.load(segment + _SEGMENT_REACH)
    offset = tl.load(tiles + t * 2 + 1) + tl.arange(0, _TILE)
    total = tl.zeros([_TILE], tl.float32)
    source = tl.load(segment + _SOURCE)
    if source >= 0:
        group = groups + source * _FIELDS
        slot = tl.load(group + _SLOT) * P + pattern * tl.load(group + _TILES) - tl.load(group + _LOCAL_BEGIN)
        row_block = tl.load(group + _ROW_FIRST) // 64
        document_begin = tl.load(group + _DOCUMENT_BEGIN)
        key_end = tl.load(group + _KEY_END)
        for part in tl.static_range(4):
            block = row_block - offset - 1 + part
            there = (block >= document_begin) & (block < key_end)
            local = tl.load(local_of + block, mask=there, other=-1)
            total += tl.load(partials + (slot + local) * 4 + part, mask=local >= 0, other=0.0)
    at = tl.load(segment + _SEGMENT_SLOT) * P + pattern * reach + offset
    tl.store(mass + at, total, mask=offset < reach)


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
    pid = tl.program_id(0).to(tl.int64)
    t = pid // P
    pattern = pid % P
    segment = segments + tl.load(tiles + t * 2) * _SEGMENT_FIELDS
    reach = tl.load(segment + _SEGMENT_REACH)
    offset = tl.load(tiles + t * 2 + 1) + tl.arange(0, _TILE)
    on = offset < tl.load(segment + _FORCED)
    at = tl.load(segment + _SEGMENT_SLOT) * P + pattern * reach + offset
    if WORDS:
        source = tl.load(segment + _SOURCE)
        if source >= 0:
            group = groups + source * _FIELDS
            probed = tl.load(group + _REACH)
            words = mass + tl.load(group + _REACH_SLOT) * P + pattern * probed
            own = tl.load(words + offset, mask=offset < probed, other=0)
            nearer = tl.load(words + offset - 1, mask=(offset > 0) & (offset <= probed), other=0)
            on = on | (own != 0) | ((nearer & -2) != 0)
    else:
        on = on | (tl.load(mass + at, mask=offset < reach, other=0.0) > threshold)
    tl.store(flags + 1 + at, on.to(tl.int64), mask=offset < reach)
    tl.store(flags, tl.zeros([], tl.int64), mask=pid == 0)


@triton.jit
def _mean_probabilities(
    q, k_tile, lse, q_rows, row_lse, head, g, G, scale2, HPP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Probabilities [T keys, R] of one key block, averaged over the heads of a pattern; those of the first head are at hand."""
    p = _probabilities(q, k_tile, row_lse, scale2)
    for more in range(1, HPP):
        other = _row_tile(q_rows, head + more, g, G, 64, D, BLOCK_D)
        p += _probabilities(other, k_tile, _row_lse(lse, head + more, g, G, 64), scale2)
    return p / HPP


@triton.jit
def mass_kernel(
    q_rows,
    k,
    lse,
    groups,
    chunks,
    key_blocks,
    columns,  # fp32 [slots, T] from slot ``slot_first`` on: mean mass of single keys; -1 for keys behind the probed ones
    diagonals,  # int64 [slots, 2, T] likewise: each block's mass on token diagonals, summed over the rows, in units
    k_head_stride,
    k_stride,
    scale2,
    chunk_first,
    slot_first,
    G,
    P,
    GROUP: tl.constexpr,
    HPP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Mass of keys and of token diagonals in one pass. Grid: chunks * P from ``chunk_first`` on, patterns fastest.

    Row i and key j of a block lie on its diagonal i - j. Turning the keys of row i by i puts diagonal d >= 0 into line d, and
    d - 64 there, too, for the rows i < d: the second half of ``diagonals``. Sums of integers do not depend on where a diagonal
    is cut into two blocks, so that diagonals of equal probabilities tie.
    """
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P + chunk_first
    pattern = pid % P
    g = tl.load(chunks + c * 3)
    group = groups + g * _FIELDS
    if tl.load(group + _TARGET) >= 0:
        slot = tl.load(group + _SLOT) * P + pattern * tl.load(group + _TILES) - tl.load(group + _LOCAL_BEGIN) - slot_first
        i = tl.arange(0, 64)
        row = tl.load(group + _ROW_FIRST) + i
        rows = tl.load(group + _ROW_COUNT).to(tl.float32)
        key_end = tl.load(group + _KEY_END)
        head = pattern * HPP
        k_head = k + head // GROUP * k_head_stride
        q = _row_tile(q_rows, head, g, G, 64, D, BLOCK_D)
        row_lse = _row_lse(lse, head, g, G, 64)
        for local in range(tl.load(chunks + c * 3 + 1), tl.load(chunks + c * 3 + 2)):
            block = tl.load(key_blocks + local)
            tile = _key_tile(k_head, k_stride, local, D, BLOCK_D)
            p = _mean_probabilities(q, tile, lse, q_rows, row_lse, head, g, G, scale2, HPP, D, BLOCK_D)
            future = (block * 64 + i)[:, None] > row[None, :]
            p = tl.where(future, 0.0, p)
            mass = tl.where(block < key_end, tl.sum(p, 1) / rows, -1.0)
            tl.store(columns + (slot + local) * 64 + i, mass)
            lag = i[None, :] - i[:, None]
            turned = (tl.gather(p, lag & 63, 0) * _UNIT).to(tl.int64)
            whole = tl.sum(turned, 1)
            later = tl.sum(tl.where(lag >= 0, turned, 0), 1)
            at = diagonals + (slot + local) * 128 + i
            tl.store(at, later)
            tl.store(at + 64, whole - later)


@triton.jit
def offset_mass_kernel(
    diagonals,  # int64 [slots, 2, T], as `mass_kernel` writes them
    groups,
    offset_chunks,
    local_of,
    mass,  # [slots * T] of token offsets, from slot ``offset_first`` on: int64 units; fp32, in 64ths, unless SHARED
    chunk_first,
    slot_first,
    offset_first,
    P,
    SHARED: tl.constexpr,  # other ranks hold other keys
    BLOCKS: tl.constexpr,
):
    """Mass of token diagonals over this rank's keys: each passes through two blocks at a time. Grid: offset chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P + chunk_first
    pattern = pid % P
    g = tl.load(offset_chunks + c * 3)
    group = groups + g * _FIELDS
    if tl.load(group + _TARGET) >= 0:
        first = tl.load(group + _ROW_FIRST)
        document_begin = tl.load(group + _DOCUMENT_BEGIN)
        key_end = tl.load(group + _KEY_END)
        slot = tl.load(group + _SLOT) * P + pattern * tl.load(group + _TILES) - tl.load(group + _LOCAL_BEGIN) - slot_first
        out = mass + (tl.load(group + _REACH_SLOT) * P + pattern * tl.load(group + _REACH) - offset_first) * 64
        last = tl.load(offset_chunks + c * 3 + 2) * 64
        for begin in range(tl.load(offset_chunks + c * 3 + 1) * 64, last, BLOCKS * 64):
            offset = begin + tl.arange(0, BLOCKS * 64)
            behind = offset - first  # minus the key that the first row meets
            block = (63 - behind) >> 6  # the one whose diagonal (behind & 63) lies on it; the one before follows
            there = (block >= document_begin) & (block < key_end)
            local = tl.load(local_of + block, mask=there, other=-1)
            total = tl.load(diagonals + (slot + local) * 128 + (behind & 63), mask=local >= 0, other=0)
            there = (block > document_begin) & (block <= key_end)
            local = tl.load(local_of + block - 1, mask=there, other=-1)
            total += tl.load(diagonals + (slot + local) * 128 + 64 + (behind & 63), mask=local >= 0, other=0)
            if not SHARED:
                total = total.to(tl.float32) * _MEAN
            tl.store(out + offset, total, mask=offset < last)
