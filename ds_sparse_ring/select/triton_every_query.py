"""Triton: which keys the queries want, see `every_query`. One look at each score; exponentials only of the largest in a block.

A program takes one query block of one or more heads of a pattern, whose rows share each block of keys, and walks from near keys
to far ones. Scores are in base 2.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_sparse_ring.config import EveryQuerySelector
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.every_query import LocalRows

T = tl.constexpr(BLOCK)


@triton.jit
def _scores(rows, keys, k_token, block, token, dim, scale2, D: tl.constexpr, PRECISION: tl.constexpr):
    """Scaled scores ``[rows, T]`` against one block of keys."""
    at = keys + (block * T + token[None, :]).to(tl.int64) * k_token + dim[:, None]
    return tl.dot(rows, tl.load(at, mask=dim[:, None] < D, other=0.0), input_precision=PRECISION) * scale2


@triton.jit
def _taken_in(largest, total, seen):
    """The running sum of the largest exponentials of blocks, as maximum and sum relative to it, with one block more."""
    new = tl.maximum(largest, seen)
    return new, total * tl.exp2(largest - new) + tl.exp2(seen - new)


@triton.jit
def _mark(scores, limit, word, token):
    """Set the bits of the keys that any row wants."""
    excess = tl.max(scores - limit[:, None], 0)
    one = tl.full([T], 1, tl.int64)
    bits = tl.sum(tl.where(excess >= 0, one << token.to(tl.int64), 0), 0)
    tl.atomic_or(word, bits, mask=bits != 0, sem="relaxed")


@triton.jit(do_not_specialize=["local_blocks", "groups"])
def wanted_kernel(
    q,  # [H, n, D]
    k,  # [K, N, D]
    block_of,  # int64 [b], see LocalRows
    first_of,
    valid_of,
    slot_of,
    reach_of,
    words,  # int64, bits by slot
    q_head,
    q_token,
    k_head,
    k_token,
    scale2,
    log2_price,
    window,
    local_blocks,
    groups,  # H / HEADS
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HPP: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    local = local_blocks - 1 - pid // groups  # late blocks, which have most to read, first
    head = pid % groups * HEADS
    own, first = tl.load(block_of + local), tl.load(first_of + local)
    valid, reach = tl.load(valid_of + local), tl.load(reach_of + local)
    if own - first >= window and valid > 0:
        row, token, dim = tl.arange(0, HEADS * T), tl.arange(0, T), tl.arange(0, BLOCK_D)
        place = local * T + row % T
        at = q + (head + row // T).to(tl.int64) * q_head + place.to(tl.int64) * q_token
        rows = tl.load(at[:, None] + dim[None, :], mask=dim[None, :] < D, other=0.0)
        keys = k + (head // GROUP).to(tl.int64) * k_head
        word = words + tl.load(slot_of + local) + head // HPP * reach - first
        # rows that fill up the document want nothing
        offset = tl.where(row % T < valid, log2_price, float("inf"))

        scores = _scores(rows, keys, k_token, own, token, dim, scale2, D, PRECISION)
        largest = tl.max(tl.where(token[None, :] <= (row % T)[:, None], scores, float("-inf")), 1)
        total = tl.full([HEADS * T], 1.0, tl.float32)
        first_scores = _scores(rows, keys, k_token, first, token, dim, scale2, D, PRECISION)
        largest, total = _taken_in(largest, total, tl.max(first_scores, 1))
        last_near = tl.maximum(first, own - window)
        for back in range(1, own - last_near):
            scores = _scores(rows, keys, k_token, own - back, token, dim, scale2, D, PRECISION)
            largest, total = _taken_in(largest, total, tl.max(scores, 1))
        for back in range(own - last_near, own - first):
            block = own - back
            scores = _scores(rows, keys, k_token, block, token, dim, scale2, D, PRECISION)
            largest, total = _taken_in(largest, total, tl.max(scores, 1))
            _mark(scores, largest + tl.log2(total) + offset, word + block, token)
        first_scores = _scores(rows, keys, k_token, first, token, dim, scale2, D, PRECISION)
        _mark(first_scores, largest + tl.log2(total) + offset, word + first, token)


def mark_wanted(
    words: Tensor, q: Tensor, keys: Tensor, rows: LocalRows, selector: EveryQuerySelector, patterns: int, scale: float
) -> None:
    """Set the bits of the keys that this rank's queries want.

    Args:
        words: int64, by slot. q: ``[H, n, D]`` and keys ``[K, N, D]``, of one dtype, float16, bfloat16 or float32.
    """
    heads, _, size = q.shape
    q, keys = (x if x.stride(2) == 1 else x.contiguous() for x in (q, keys))
    per_pattern = heads // patterns
    together = 2 if per_pattern % 2 == 0 and size * q.element_size() <= 256 else 1
    local_blocks, groups = rows.block.numel(), heads // together
    with torch.cuda.device_of(q):
        wanted_kernel[(local_blocks * groups,)](
            q, keys, rows.block, rows.first, rows.valid, rows.slot, rows.reach, words, q.stride(0), q.stride(1), keys.stride(0),
            keys.stride(1), scale * math.log2(math.e), math.log2(selector.price), selector.window_blocks, local_blocks, groups,
            D=size, BLOCK_D=max(16, triton.next_power_of_2(size)), HPP=per_pattern, GROUP=heads // keys.shape[0], HEADS=together,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
        )  # fmt: skip
