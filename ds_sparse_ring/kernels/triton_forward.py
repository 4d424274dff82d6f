"""Triton: forward attention of one query block and head over the keys that the index names, in one online softmax.

A program walks a list of key blocks (local offsets of block diagonals, explicit lists, or a plain range), then the compact
columns. What comes next in a list is loaded one step ahead, so that no step waits for an address. See `hop_index` for the tables.
Maxima are kept in base 2: ``scale_log2`` is the scale times log2(e).

Three programs to a multiprocessor hide each other's waits better than a software pipeline does: hence one stage and a bound on
registers. Tiles of two query blocks, and two key blocks a step, were tried and were slower (docs/measurements.md).
"""

import triton
import triton.language as tl

from ds_sparse_ring.kernels.hop_index import BLOCK_LISTS, FULL, VERTICAL_SLASH
from ds_sparse_ring.kernels.triton_tables import bits_below
from ds_sparse_ring.layout import BLOCK

KIND_FULL, KIND_VERTICAL_SLASH, KIND_BLOCK_LISTS = tl.constexpr(FULL), tl.constexpr(VERTICAL_SLASH), tl.constexpr(BLOCK_LISTS)
T = tl.constexpr(BLOCK)
LN2 = tl.constexpr(0.6931471805599453)
# change with the data: a kernel compiled for each of their divisors would stall training whenever a new length comes
VARYING = "q_blocks k_blocks base q_stride q_start patterns group heads_per_pattern words column_words".split()
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
def query_of_program(q_blocks, group, heads_per_pattern, patterns, q_segment):
    """One key/value head at a time, late (long) query blocks first, the heads that share its keys beside each other."""
    pid = tl.program_id(0)
    kv_head = pid // (q_blocks * group)
    block = q_blocks - 1 - pid % (q_blocks * group) // group
    head = kv_head * group + pid % group
    pattern = head // heads_per_pattern
    segment = tl.load(q_segment + block)
    return kv_head, head, block, pattern, segment, segment * patterns + pattern


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


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(q_desc, k_desc, v_desc, column_k_desc, column_v_desc, o, lse,
                   o_head, o_row, lse_head, q_blocks, k_blocks, base, q_stride, q_start, patterns, scale_log2,
                   group, heads_per_pattern, segments, q_segment, ptr, values, bits, before, words,
                   column_ptr, column_ids, column_end, column_bits, column_words,
                   D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr,
                   OVERWRITE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    kv_head, head, block, pattern, segment, row = query_of_program(q_blocks, group, heads_per_pattern, patterns, q_segment)
    low, high = key_range(block, segment, pattern, patterns, q_blocks, k_blocks, base, segments, ptr, bits, before, words,
                          KIND, OWN)  # fmt: skip

    q = q_desc.load([head, block * T, 0]).reshape(T, DP)
    acc = tl.zeros([T, DP], tl.float32)
    largest = tl.full([T], LOWEST, tl.float32)
    total = tl.zeros([T], tl.float32)
    rows, keys = tl.arange(0, T), tl.arange(0, T)

    own = block + base
    if OWN and own < k_blocks and own >= 0:
        k = k_desc.load([kv_head, own * T, 0]).reshape(T, DP)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        s = tl.where(rows[:, None] >= keys[None, :], s, float("-inf"))
        v = v_desc.load([kv_head, own * T, 0]).reshape(T, DP)
        acc, largest, total = softmax_step(s, v, acc, largest, total, scale_log2, PRECISION)

    following = tl.load(values + low) if KIND != KIND_FULL else 0
    for j in tl.range(low, high, num_stages=STAGES):
        if KIND == KIND_FULL:
            key = j
        else:
            key = own - following if KIND == KIND_VERTICAL_SLASH else following
            following = tl.load(values + j + 1)
        k = k_desc.load([kv_head, key * T, 0]).reshape(T, DP)
        s = tl.dot(q, k.T, input_precision=PRECISION)
        v = v_desc.load([kv_head, key * T, 0]).reshape(T, DP)
        acc, largest, total = softmax_step(s, v, acc, largest, total, scale_log2, PRECISION)

    if COLUMNS:
        start = tl.load(column_ptr + row).to(tl.int32)
        count = tl.load(column_end + pattern * q_blocks + block)
        q_global = block * q_stride + q_start
        lanes = tl.arange(0, TILE)
        ids = tl.load(column_ids + start + lanes, mask=lanes < count, other=0)
        covered = columns_covered(column_bits, row, column_words, q_global - (ids // T).to(tl.int32))
        ids = tl.load(column_ids + start + TILE + lanes, mask=TILE + lanes < count, other=0)
        for at in tl.range(0, count, TILE, num_stages=STAGES):
            counted = (covered == 0) & (at + lanes < count)
            covered = columns_covered(column_bits, row, column_words, q_global - (ids // T).to(tl.int32))
            ahead = at + 2 * TILE + lanes
            ids = tl.load(column_ids + start + ahead, mask=ahead < count, other=0)
            k = column_k_desc.load([start + at, 0])
            s = tl.where(counted[None, :], tl.dot(q, k.T, input_precision=PRECISION), float("-inf"))
            v = column_v_desc.load([start + at, 0])
            acc, largest, total = softmax_step(s, v, acc, largest, total, scale_log2, PRECISION)

    write_rows(o, lse, o_head, o_row, lse_head, head, block, acc, largest, total, D, DP, OVERWRITE)


@triton.jit
def write_rows(o, lse, o_head, o_row, lse_head, head, block, acc, largest, total,
               D: tl.constexpr, DP: tl.constexpr, OVERWRITE: tl.constexpr):  # fmt: skip
    """Write a normalised result, or merge it; rows without a key have o = 0, lse = -inf and change nothing."""
    rows, dims = tl.arange(0, T), tl.arange(0, DP)
    token = (block * T + rows).to(tl.int64)
    inside = dims[None, :] < D
    o_at = o + head.to(tl.int64) * o_head + token[:, None] * o_row + dims[None, :]
    lse_at = lse + head.to(tl.int64) * lse_head + token
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    new = tl.where(some, largest * LN2 + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    if not OVERWRITE:
        old = tl.load(lse_at)
        high = tl.maximum(old, new)
        high = tl.where(high == float("-inf"), 0.0, high)
        old_weight, new_weight = tl.exp(old - high), tl.exp(new - high)
        weights = old_weight + new_weight
        divisor = tl.where(weights > 0, weights, 1.0)
        so_far = tl.load(o_at, mask=inside, other=0.0).to(tl.float32)
        acc = acc * (new_weight / divisor)[:, None] + so_far * (old_weight / divisor)[:, None]
        new = tl.where(weights > 0, high + tl.log(divisor), float("-inf"))
    tl.store(o_at, acc.to(o.dtype.element_ty), mask=inside)
    tl.store(lse_at, new)
