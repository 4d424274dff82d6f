"""Triton: selection by mass: mass of single keys and of token diagonals. Shapes as in `triton_probe`."""

import triton
import triton.language as tl

from ds_sparse_ring.select.triton_fields import (
    DOCUMENT_BEGIN,
    GROUP_FIELDS,
    KEY_END,
    LOCAL_BEGIN,
    REACH,
    REACH_SLOT,
    ROW_COUNT,
    ROW_FIRST,
    SLOT,
    TARGET,
    TILES,
)
from ds_sparse_ring.select.triton_probe import key_tile, lse_of_rows, probabilities, row_tile

UNITS = 52  # token diagonals add up in units of 2**-52: the probabilities of 64 rows stay below 2**63
MEAN = 2.0 ** -(UNITS + 6)  # a 64th of their sum, whether or not a group has 64 rows: only the order within it counts
_UNIT = tl.constexpr(2.0**UNITS)
_MEAN = tl.constexpr(MEAN)


@triton.jit
def _mean_probabilities(
    q, k_tile, lse, q_rows, row_lse, head, g, G, scale2, HPP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Probabilities [T keys, R] of one key block, averaged over the heads of a pattern; those of the first head are at hand."""
    p = probabilities(q, k_tile, row_lse, scale2)
    for more in range(1, HPP):
        other = row_tile(q_rows, head + more, g, G, 64, D, BLOCK_D)
        p += probabilities(other, k_tile, lse_of_rows(lse, head + more, g, G, 64), scale2)
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
    group = groups + g * GROUP_FIELDS
    if tl.load(group + TARGET) >= 0:
        slot = tl.load(group + SLOT) * P + pattern * tl.load(group + TILES) - tl.load(group + LOCAL_BEGIN) - slot_first
        i = tl.arange(0, 64)
        row = tl.load(group + ROW_FIRST) + i
        rows = tl.load(group + ROW_COUNT).to(tl.float32)
        key_end = tl.load(group + KEY_END)
        head = pattern * HPP
        k_head = k + head // GROUP * k_head_stride
        q = row_tile(q_rows, head, g, G, 64, D, BLOCK_D)
        row_lse = lse_of_rows(lse, head, g, G, 64)
        for local in range(tl.load(chunks + c * 3 + 1), tl.load(chunks + c * 3 + 2)):
            block = tl.load(key_blocks + local)
            tile = key_tile(k_head, k_stride, local, D, BLOCK_D)
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
    group = groups + g * GROUP_FIELDS
    if tl.load(group + TARGET) >= 0:
        first = tl.load(group + ROW_FIRST)
        document_begin = tl.load(group + DOCUMENT_BEGIN)
        key_end = tl.load(group + KEY_END)
        slot = tl.load(group + SLOT) * P + pattern * tl.load(group + TILES) - tl.load(group + LOCAL_BEGIN) - slot_first
        out = mass + (tl.load(group + REACH_SLOT) * P + pattern * tl.load(group + REACH) - offset_first) * 64
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
