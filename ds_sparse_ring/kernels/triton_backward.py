"""Triton: gradients in three kernels without atomics, so that every element has one writer and results repeat bit for bit.

* ``dq_kernel``: one query block and head, the same walk as the forward pass;
* ``dkv_kernel``: one key block of a key/value head over all query blocks and heads that read it. Diagonals need no transposed
  lists: key block j is read by query block ``j - base + a`` for the same offsets a;
* ``dcolumns_kernel``: one tile of columns over the query blocks of its segment.

Each recomputes the scores and takes their probabilities from the saved log-sum-exp.
"""

import triton
import triton.language as tl

from ds_sparse_ring.kernels.triton_forward import (
    KIND_BLOCK_LISTS,
    KIND_FULL,
    KIND_VERTICAL_SLASH,
    VARYING,
    T,
    columns_covered,
    key_range,
    offsets_below,
    query_of_program,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(lse, delta, head, rows_per_head, token):
    """log-sum-exp in base 2 and delta of query rows; a row without any key has only masked scores, whatever stands here."""
    at = tl.full([], 1, tl.int64) * head * rows_per_head + token
    value = tl.load(lse + at) * LOG2E
    return tl.where(value == float("-inf"), 0.0, value), tl.load(delta + at)


@triton.jit
def dq_step(q, do, lse, delta, k, v, dq, visible, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale_log2 - lse[:, None]
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    p = tl.exp2(s)
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(q_desc, do_desc, k_desc, v_desc, column_k_desc, column_v_desc, lse, delta, dq,
              dq_head, dq_row, q_blocks, k_blocks, base, q_stride, q_start, patterns, group, heads_per_pattern, scale, scale_log2,
              segments, q_segment, ptr, values, bits, before, words,
              column_ptr, column_ids, column_end, column_bits, column_words,
              D: tl.constexpr, DP: tl.constexpr,
              KIND: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr, OVERWRITE: tl.constexpr,
              TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    kv_head, head, block, pattern, segment, row = query_of_program(q_blocks, group, heads_per_pattern, patterns, q_segment)
    low, high = key_range(block, segment, pattern, patterns, q_blocks, k_blocks, base, segments, ptr, bits, before, words,
                          KIND, OWN)  # fmt: skip

    rows, keys = tl.arange(0, T), tl.arange(0, T)
    token = (block * T + rows).to(tl.int64)
    q = q_desc.load([head, block * T, 0]).reshape(T, DP)
    do = do_desc.load([head, block * T, 0]).reshape(T, DP)
    row_lse, row_delta = load_rows(lse, delta, head, q_blocks * T, token)
    acc = tl.zeros([T, DP], tl.float32)
    causal = rows[:, None] >= keys[None, :]

    own = block + base
    if OWN and own < k_blocks and own >= 0:
        k = k_desc.load([kv_head, own * T, 0]).reshape(T, DP)
        v = v_desc.load([kv_head, own * T, 0]).reshape(T, DP)
        acc = dq_step(q, do, row_lse, row_delta, k, v, acc, causal, scale_log2, True, PRECISION)

    following = tl.load(values + low) if KIND != KIND_FULL else 0
    for j in tl.range(low, high, num_stages=STAGES):
        if KIND == KIND_FULL:
            key = j
        else:
            key = own - following if KIND == KIND_VERTICAL_SLASH else following
            following = tl.load(values + j + 1)
        k = k_desc.load([kv_head, key * T, 0]).reshape(T, DP)
        v = v_desc.load([kv_head, key * T, 0]).reshape(T, DP)
        acc = dq_step(q, do, row_lse, row_delta, k, v, acc, causal, scale_log2, False, PRECISION)

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
            v = column_v_desc.load([start + at, 0])
            acc = dq_step(q, do, row_lse, row_delta, k, v, acc, counted[None, :], scale_log2, True, PRECISION)

    dims = tl.arange(0, DP)
    at = dq + head.to(tl.int64) * dq_head + token[:, None] * dq_row + dims[None, :]
    inside = dims[None, :] < D
    acc = acc * scale
    if not OVERWRITE:
        acc += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, acc.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def dkv_step(q, do, lse, delta, k, v, dk, dv, visible, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Everything transposed: scores are ``[keys, queries]``."""
    s = tl.dot(k, q.T, input_precision=PRECISION) * scale_log2 - lse[None, :]
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    p = tl.exp2(s)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def query_range(key, segment, pattern, patterns, k_blocks, base, segments, ptr, bits, before, words,
                KIND: tl.constexpr, OWN: tl.constexpr):  # fmt: skip
    """Where the list of query blocks of a segment that read a key block begins and ends; its own query block is not in it."""
    first, end = tl.load(segments + 3 * segment), tl.load(segments + 3 * segment + 1)
    first_key = tl.load(segments + 3 * segment + 2)
    if KIND == KIND_VERTICAL_SLASH:
        row = segment * patterns + pattern
        start = tl.load(ptr + row).to(tl.int32)
        low = start + offsets_below(bits, before, row, words, first + base - key)
        high = start + offsets_below(bits, before, row, words, end + base - key)
        high = tl.where(key < first_key, low, high)
    elif KIND == KIND_BLOCK_LISTS:
        low = tl.load(ptr + pattern * k_blocks + key)
        high = tl.load(ptr + pattern * k_blocks + key + 1)
    else:
        low = tl.maximum(first, key - base + (1 if OWN else 0))
        high = tl.where(key < first_key, low, end)
    return low, high


@triton.jit(do_not_specialize=VARYING)
def dkv_kernel(q_desc, do_desc, k_desc, v_desc, lse, delta, dk, dv,
               dk_head, dk_row, dv_head, dv_row, q_blocks, k_blocks, base, patterns, group, heads_per_pattern, scale, scale_log2,
               segments, k_segments, ptr, values, bits, before, words,
               D: tl.constexpr, DP: tl.constexpr,
               KIND: tl.constexpr, OWN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    kv_head, key = tl.program_id(0) // k_blocks, tl.program_id(0) % k_blocks  # early key blocks have most readers
    k = k_desc.load([kv_head, key * T, 0]).reshape(T, DP)
    v = v_desc.load([kv_head, key * T, 0]).reshape(T, DP)
    dk_acc, dv_acc = tl.zeros([T, DP], tl.float32), tl.zeros([T, DP], tl.float32)
    keys, rows = tl.arange(0, T), tl.arange(0, T)
    causal = rows[None, :] >= keys[:, None]
    own = key - base
    first_segment, last_segment = tl.load(k_segments + 2 * key), tl.load(k_segments + 2 * key + 1)
    if KIND == KIND_BLOCK_LISTS:
        last_segment = first_segment + 1  # a list holds the queries of all segments

    for head in tl.range(kv_head * group, (kv_head + 1) * group):
        pattern = head // heads_per_pattern
        if OWN and own < q_blocks and own >= 0:
            q = q_desc.load([head, own * T, 0]).reshape(T, DP)
            do = do_desc.load([head, own * T, 0]).reshape(T, DP)
            row_lse, row_delta = load_rows(lse, delta, head, q_blocks * T, own * T + rows)
            dk_acc, dv_acc = dkv_step(q, do, row_lse, row_delta, k, v, dk_acc, dv_acc, causal, scale_log2, True, PRECISION)
        for segment in tl.range(first_segment, last_segment):
            low, high = query_range(key, segment, pattern, patterns, k_blocks, base, segments, ptr, bits, before, words,
                                    KIND, OWN)  # fmt: skip
            following = tl.load(values + low) if KIND != KIND_FULL else 0
            for j in tl.range(low, high, num_stages=STAGES):
                if KIND == KIND_FULL:
                    block = j
                else:
                    block = own + following if KIND == KIND_VERTICAL_SLASH else following
                    following = tl.load(values + j + 1)
                q = q_desc.load([head, block * T, 0]).reshape(T, DP)
                do = do_desc.load([head, block * T, 0]).reshape(T, DP)
                row_lse, row_delta = load_rows(lse, delta, head, q_blocks * T, block * T + rows)
                dk_acc, dv_acc = dkv_step(q, do, row_lse, row_delta, k, v, dk_acc, dv_acc, causal, scale_log2, False, PRECISION)

    dims = tl.arange(0, DP)
    token = (key * T + keys).to(tl.int64)
    inside = dims[None, :] < D
    dk_at = dk + kv_head.to(tl.int64) * dk_head + token[:, None] * dk_row + dims[None, :]
    dv_at = dv + kv_head.to(tl.int64) * dv_head + token[:, None] * dv_row + dims[None, :]
    tl.store(dk_at, tl.load(dk_at, mask=inside, other=0.0) + dk_acc * scale, mask=inside)
    tl.store(dv_at, tl.load(dv_at, mask=inside, other=0.0) + dv_acc, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def dcolumns_kernel(q_desc, do_desc, column_k_desc, column_v_desc, lse, delta, dk, dv,
                    q_blocks, q_stride, q_start, patterns, heads_per_pattern, scale, scale_log2,
                    segments, column_ptr, column_ids, column_bits, column_words, tile_row, tile_begin,
                    D: tl.constexpr, DP: tl.constexpr,
                    TILE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    row = tl.load(tile_row + tl.program_id(0))
    if row < 0:
        return
    first = tl.load(tile_begin + tl.program_id(0))
    start = tl.load(column_ptr + row).to(tl.int32) + first
    count = tl.load(column_ptr + row + 1).to(tl.int32) - start
    segment, pattern = row // patterns, row % patterns
    lanes, rows = tl.arange(0, TILE), tl.arange(0, T)
    ids = tl.load(column_ids + start + lanes, mask=lanes < count, other=0)
    column_blocks = tl.where(lanes < count, (ids // T).to(tl.int32), 1 << 30)  # behind every query: never counted
    earliest = tl.min(column_blocks, 0)
    begin, end = tl.load(segments + 3 * segment), tl.load(segments + 3 * segment + 1)
    # the first query block behind the tile's earliest column
    begin = tl.maximum(begin, (tl.maximum(earliest + 1 - q_start, 0) + q_stride - 1) // q_stride)

    k = column_k_desc.load([start, 0])
    v = column_v_desc.load([start, 0])
    dk_acc, dv_acc = tl.zeros([TILE, DP], tl.float32), tl.zeros([TILE, DP], tl.float32)
    for head in tl.range(pattern * heads_per_pattern, (pattern + 1) * heads_per_pattern):
        offset = begin * q_stride + q_start - column_blocks
        covered = columns_covered(column_bits, row, column_words, offset)
        for block in tl.range(begin, end, num_stages=STAGES):
            counted = (covered == 0) & (offset > 0)
            offset += q_stride
            covered = columns_covered(column_bits, row, column_words, tl.where(block + 1 < end, offset, -1))
            q = q_desc.load([head, block * T, 0]).reshape(T, DP)
            do = do_desc.load([head, block * T, 0]).reshape(T, DP)
            row_lse, row_delta = load_rows(lse, delta, head, q_blocks * T, block * T + rows)
            dk_acc, dv_acc = dkv_step(q, do, row_lse, row_delta, k, v, dk_acc, dv_acc, counted[:, None], scale_log2, True,
                                      PRECISION)  # fmt: skip

    dims = tl.arange(0, DP)
    inside = (lanes < count)[:, None] & (dims[None, :] < D)
    at = (start + lanes).to(tl.int64)[:, None] * D + dims[None, :]
    tl.store(dk + at, tl.load(dk + at, mask=inside, other=0.0) + dk_acc * scale, mask=inside)
    tl.store(dv + at, tl.load(dv + at, mask=inside, other=0.0) + dv_acc, mask=inside)


@triton.jit
def delta_kernel(do, o, delta, do_head, do_row, do_dim, o_head, o_row, o_dim, rows_per_head,
                 D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    head, dims = tl.program_id(1).to(tl.int64), tl.arange(0, DP)
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    inside = dims[None, :] < D
    left = tl.load(do + head * do_head + token[:, None] * do_row + dims[None, :] * do_dim, mask=inside, other=0.0)
    right = tl.load(o + head * o_head + token[:, None] * o_row + dims[None, :] * o_dim, mask=inside, other=0.0)
    tl.store(delta + head * rows_per_head + token, tl.sum(left.to(tl.float32) * right.to(tl.float32), 1))


@triton.jit
def add_rows_kernel(out, place, order, x, count, out_part, out_row, x_part, x_row, D: tl.constexpr, DP: tl.constexpr):
    """One program per sorted place and part; the first of equal places adds them all, in order. Negative ones: nothing."""
    first = tl.program_id(0)
    here = tl.load(place + first).to(tl.int64)
    if here < 0:
        return
    if first > 0 and tl.load(place + first - 1, mask=first > 0, other=0).to(tl.int64) == here:
        return
    part = tl.program_id(1).to(tl.int64)
    out += part * out_part
    x += part * x_part
    dims = tl.arange(0, DP)
    inside = dims < D
    total = tl.load(out + here * out_row + dims, mask=inside, other=0.0)
    at, same = first, here
    while at < count and same == here:
        total += tl.load(x + tl.load(order + at) * x_row + dims, mask=inside, other=0.0).to(tl.float32)
        at += 1
        same = tl.load(place + at, mask=at < count, other=-1).to(tl.int64)
    tl.store(out + here * out_row + dims, total, mask=inside)
