"""Triton: forward attention of one or two neighbouring query blocks of a head over the keys that the index names.

A program walks lists of key blocks (local offsets of block diagonals, explicit lists, or a plain range), then the compact columns,
in one online softmax. Where runs of neighbouring diagonals are active, two query blocks read the same key blocks, and a tile of
both (HALVES = 2) does more per key that it loads; the ends of runs, which only one of them reads, are masked for the other. So
each (segment, pattern) is computed in the tile that suits it (`hop_index.wide_rows`), and both kernels are launched.
What comes next in a list is loaded one step ahead, so that no step waits for an address. Maxima are kept in base 2:
``scale_log2`` is the scale times log2(e).
"""

import triton
import triton.language as tl

from ds_sparse_ring.kernels.hop_index import BLOCK_LISTS, FULL, VERTICAL_SLASH
from ds_sparse_ring.kernels.triton_tables import bits_below
from ds_sparse_ring.layout import BLOCK

KIND_FULL, KIND_VERTICAL_SLASH, KIND_BLOCK_LISTS = tl.constexpr(FULL), tl.constexpr(VERTICAL_SLASH), tl.constexpr(BLOCK_LISTS)
T = tl.constexpr(BLOCK)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1.0e30)  # stands for "no key yet": finite, so that no difference of maxima is NaN


@triton.jit
def offsets_below(bits, before, row, words, x):
    """How many local offsets of a row are smaller than ``x``."""
    x = tl.minimum(tl.maximum(x, 0), (words - 1) * 32)
    at = row * words + (x >> 5)
    return tl.load(before + at) + bits_below(tl.load(bits + at), x & 31)


@triton.jit
def key_range(block, segment, pattern, patterns, q_blocks, k_blocks, base, segments, ptr, bits, before, words,
              KIND: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """Where the list of a query block begins and ends; its own key block is not in it."""
    first_key = tl.load(segments + 3 * segment + 2)
    if KIND == KIND_VERTICAL_SLASH:
        row = segment * patterns + pattern
        start = tl.load(ptr + row).to(tl.int32)
        low = start + offsets_below(bits, before, row, words, block + base - k_blocks + 1)
        high = start + offsets_below(bits, before, row, words, block + base - first_key + 1)
    elif KIND == KIND_BLOCK_LISTS:
        low = tl.load(ptr + pattern * q_blocks + block)
        high = tl.load(ptr + pattern * q_blocks + block + 1)
    else:
        low = tl.maximum(first_key, 0)
        high = tl.minimum(block + base + (0 if OWN else 1), k_blocks)
    return low, high


@triton.jit
def columns_covered(column_bits, row, words, offset):
    """1 where the diagonal ``offset`` of a row is active."""
    word = tl.load(column_bits + row * words + (offset >> 5), mask=offset >= 0, other=0)
    return (word >> (offset & 31)) & 1


@triton.jit
def softmax_step(s, v, acc, largest, total, scale_log2, PRECISION: tl.constexpr):
    """Take raw scores ``[T, keys]`` (masked ones -inf) and their values into a running softmax."""
    seen = tl.maximum(largest, tl.max(s, 1) * scale_log2)
    factor = tl.exp2(largest - seen)
    p = tl.exp2(s * scale_log2 - seen[:, None])
    total = total * factor + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision=PRECISION)
    return acc, seen, total


@triton.jit
def attend_list(q, k_desc, v_desc, kv_head, own, low, high, values, visible, acc, largest, total, scale_log2,
                KIND: tl.constexpr, MASKED: tl.constexpr, DP: tl.constexpr, STAGES: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    """Query rows over a list of key blocks; with MASKED only the rows that are ``visible``."""
    following = tl.load(values + low) if KIND != KIND_FULL else 0
    for j in tl.range(low, high, num_stages=STAGES):
        if KIND == KIND_FULL:
            key = j
        else:
            key = own - following if KIND == KIND_VERTICAL_SLASH else following
            following = tl.load(values + j + 1)
        k = k_desc.load([kv_head, key * T, 0]).reshape(T, DP)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            s = tl.where(visible[:, None], s, float("-inf"))
        v = v_desc.load([kv_head, key * T, 0]).reshape(T, DP)
        acc, largest, total = softmax_step(s, v, acc, largest, total, scale_log2, PRECISION)
    return acc, largest, total


@triton.jit
def forward_kernel(q_desc, k_desc, v_desc, column_k_desc, column_v_desc, o, lse,
                   o_head, o_row, lse_head, q_blocks, k_blocks, base, q_stride, q_start, patterns, scale_log2,
                   group, heads_per_pattern, segments, q_segment, tiles, tile_blocks, wide,
                   ptr, values, bits, before, words, both_ptr, both_values, both_bits, both_before,
                   last_ptr, last_values, last_bits, last_before, first_ptr, first_values, first_bits, first_before,
                   column_ptr, column_ids, column_end, column_bits, column_words,
                   D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr,
                   OVERWRITE: tl.constexpr, HALVES: tl.constexpr, CHOOSE: tl.constexpr, TILE: tl.constexpr,
                   STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    M: tl.constexpr = T * HALVES
    # one key/value head at a time, late (long) query blocks first, the heads that share its keys beside each other
    pid = tl.program_id(0)
    kv_head = pid // (tiles * group)
    block = tl.load(tile_blocks + tiles - 1 - pid % (tiles * group) // group)
    head = kv_head * group + pid % group
    pattern = head // heads_per_pattern
    segment = tl.load(q_segment + block)
    row = segment * patterns + pattern
    if CHOOSE:
        if tl.load(wide + row) != HALVES - 1:
            return
    end = tl.load(segments + 3 * segment + 1)  # an odd segment ends in half a pair
    own = block + base

    q = q_desc.load([head, block * T, 0]).reshape(M, DP)
    acc = tl.zeros([M, DP], tl.float32)
    largest = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    rows, keys = tl.arange(0, M), tl.arange(0, T)

    if OWN:
        for half in tl.static_range(HALVES):
            if own + half < k_blocks and own + half >= 0:
                k = k_desc.load([kv_head, (own + half) * T, 0]).reshape(T, DP)
                s = tl.dot(q, k.T, input_precision=PRECISION)
                behind = rows[:, None] - half * T
                s = tl.where((behind >= keys[None, :]) & (behind < T), s, float("-inf"))
                v = v_desc.load([kv_head, (own + half) * T, 0]).reshape(T, DP)
                acc, largest, total = softmax_step(s, v, acc, largest, total, scale_log2, PRECISION)

    if HALVES == 1:
        low, high = key_range(block, segment, pattern, patterns, q_blocks, k_blocks, base, segments,
                              ptr, bits, before, words, KIND, OWN)  # fmt: skip
        acc, largest, total = attend_list(q, k_desc, v_desc, kv_head, own, low, high, values, rows < T, acc, largest, total,
                                          scale_log2, KIND, False, DP, STAGES, PRECISION)  # fmt: skip
    else:
        # key blocks that both query blocks read, then those of one alone: where a run of diagonals ends, and where it begins
        low, high = key_range(block, segment, pattern, patterns, q_blocks, k_blocks, base, segments,
                              both_ptr, both_bits, both_before, words, KIND, OWN)  # fmt: skip
        acc, largest, total = attend_list(q, k_desc, v_desc, kv_head, own, low, high, both_values, rows < T, acc, largest, total,
                                          scale_log2, KIND, False, DP, STAGES, PRECISION)  # fmt: skip
        if KIND == KIND_VERTICAL_SLASH:
            low, high = key_range(block, segment, pattern, patterns, q_blocks, k_blocks, base, segments,
                                  last_ptr, last_bits, last_before, words, KIND, OWN)  # fmt: skip
            acc, largest, total = attend_list(q, k_desc, v_desc, kv_head, own, low, high, last_values, rows < T, acc, largest,
                                              total, scale_log2, KIND, True, DP, STAGES, PRECISION)  # fmt: skip
        low, high = key_range(block + 1, segment, pattern, patterns, q_blocks, k_blocks, base, segments,
                              first_ptr, first_bits, first_before, words, KIND, OWN)  # fmt: skip
        if KIND == KIND_FULL:
            low = tl.maximum(low, own + (0 if OWN else 1))
        acc, largest, total = attend_list(q, k_desc, v_desc, kv_head, own + 1, low, high, first_values, rows >= T, acc, largest,
                                          total, scale_log2, KIND, True, DP, STAGES, PRECISION)  # fmt: skip

    if COLUMNS:
        start = tl.load(column_ptr + row).to(tl.int32)
        later = tl.minimum(block + HALVES, end) - 1
        count = tl.load(column_end + pattern * q_blocks + block)
        count_later = tl.load(column_end + pattern * q_blocks + later)
        q_global = block * q_stride + q_start
        lanes = tl.arange(0, TILE)
        ids = tl.load(column_ids + start + lanes, mask=lanes < count_later, other=0)
        covered = columns_covered(column_bits, row, column_words, q_global - (ids // T).to(tl.int32))
        covered_later = (
            columns_covered(column_bits, row, column_words, q_global + q_stride - (ids // T).to(tl.int32))
            if HALVES == 2
            else covered
        )
        ids = tl.load(column_ids + start + TILE + lanes, mask=TILE + lanes < count_later, other=0)
        for at in tl.range(0, count_later, TILE, num_stages=STAGES):
            counted = ((covered == 0) & (at + lanes < count))[None, :]
            if HALVES == 2:
                counted_later = ((covered_later == 0) & (at + lanes < count_later))[None, :]
                counted = ((rows < T)[:, None] & counted) | ((rows >= T)[:, None] & counted_later)
                covered_later = columns_covered(column_bits, row, column_words, q_global + q_stride - (ids // T).to(tl.int32))
            covered = columns_covered(column_bits, row, column_words, q_global - (ids // T).to(tl.int32))
            ahead = at + 2 * TILE + lanes
            ids = tl.load(column_ids + start + ahead, mask=ahead < count_later, other=0)
            k = column_k_desc.load([start + at, 0])
            s = tl.where(counted, tl.dot(q, k.T, input_precision=PRECISION), float("-inf"))
            v = column_v_desc.load([start + at, 0])
            acc, largest, total = softmax_step(s, v, acc, largest, total, scale_log2, PRECISION)

    write_rows(o, lse, o_head, o_row, lse_head, head, block, rows < (end - block) * T, acc, largest, total, M, D, DP, OVERWRITE)


@triton.jit
def write_rows(o, lse, o_head, o_row, lse_head, head, block, written, acc, largest, total,
               M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, OVERWRITE: tl.constexpr):  # fmt: skip
    """Write a normalised result, or merge it; rows without a key have o = 0, lse = -inf and change nothing."""
    rows, dims = tl.arange(0, M), tl.arange(0, DP)
    token = (block * T + rows).to(tl.int64)
    inside = written[:, None] & (dims[None, :] < D)
    o_at = o + head.to(tl.int64) * o_head + token[:, None] * o_row + dims[None, :]
    lse_at = lse + head.to(tl.int64) * lse_head + token
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    new = tl.where(some, largest * LN2 + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    if not OVERWRITE:
        old = tl.load(lse_at, mask=written, other=0.0)
        high = tl.maximum(old, new)
        high = tl.where(high == float("-inf"), 0.0, high)
        old_weight, new_weight = tl.exp(old - high), tl.exp(new - high)
        weights = old_weight + new_weight
        divisor = tl.where(weights > 0, weights, 1.0)
        so_far = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
        acc = acc * (new_weight / divisor)[:, None] + so_far * (old_weight / divisor)[:, None]
        new = tl.where(weights > 0, high + tl.log(divisor), float("-inf"))
    tl.store(o_at, acc.to(o.dtype.element_ty), mask=inside)
    tl.store(lse_at, new, mask=written)
