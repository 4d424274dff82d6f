"""Triton: the tables of `hop_index` from an index of diagonals and columns, one program per row (segment, pattern)."""

import triton
import triton.language as tl

from ds_sparse_ring.layout import BLOCK

T = tl.constexpr(BLOCK)


@triton.jit
def count_bits(b):
    """Set bits of unsigned 32-bit words."""
    b = b - ((b >> 1) & 0x55555555)
    b = (b & 0x33333333) + ((b >> 2) & 0x33333333)
    b = (b + (b >> 4)) & 0x0F0F0F0F
    b = b + (b >> 8)
    return ((b + (b >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def bits_below(word, position):
    """How many bits of a word stand below a position of 0 to 31."""
    return count_bits(word.to(tl.uint32, bitcast=True) & ((1 << position.to(tl.uint32)) - 1))


@triton.jit
def store_part(bits, before, at, inside, part, so_far):
    """Words of one subset and the counts before them; returns the count behind them."""
    count = tl.where(inside, count_bits(part), 0)
    tl.store(bits + at, part.to(tl.int32, bitcast=True), mask=inside)
    tl.store(before + at, so_far + tl.cumsum(count, 0) - count, mask=inside)
    return so_far + tl.sum(count, 0)


@triton.jit
def list_part(values, bits, before, start, word_at, a, kept):
    """Write the offsets of one subset in order."""
    word = tl.load(bits + word_at, mask=kept, other=0)
    place = tl.load(before + word_at, mask=kept, other=0) + bits_below(word, a & 31)
    tl.store(values + start + place, a, mask=kept & (((word >> (a & 31)) & 1) == 1))


@triton.jit
def offsets_kernel(diagonal_ptr, diagonals, column_ptr, stride, residue, words, gain,
                   values, bits, before, both_values, both_bits, both_before,
                   last_values, last_bits, last_before, first_values, first_bits, first_before, wide,
                   COLUMNS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    start, end = tl.load(diagonal_ptr + row).to(tl.int32), tl.load(diagonal_ptr + row + 1).to(tl.int32)
    lanes = tl.arange(0, CHUNK)
    for at in tl.range(start, end, CHUNK):
        d = tl.load(diagonals + at + lanes, mask=at + lanes < end, other=0).to(tl.int32)
        kept = (d > 0) & (d % stride == residue)
        a = (d - residue) // stride
        tl.atomic_or(bits + row * words + (a >> 5), 1 << (a & 31), mask=kept)
    tl.debug_barrier()
    total, both_total, last_total, first_total = 0, 0, 0, 0
    for w in tl.range(0, words, CHUNK):
        inside = w + lanes < words
        at = row * words + w + lanes
        own = tl.load(bits + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        behind = tl.load(bits + at + 1, mask=w + lanes + 1 < words, other=0).to(tl.uint32, bitcast=True)
        ahead = tl.load(bits + at - 1, mask=inside & (w + lanes > 0), other=0).to(tl.uint32, bitcast=True)
        above, below = (own >> 1) | (behind << 31), (own << 1) | (ahead >> 31)
        count = tl.where(inside, count_bits(own), 0)
        tl.store(before + at, total + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
        both_total = store_part(both_bits, both_before, at, inside, own & above, both_total)
        last_total = store_part(last_bits, last_before, at, inside, own & ~above, last_total)
        first_total = store_part(first_bits, first_before, at, inside, own & ~below, first_total)
    tl.debug_barrier()
    for at in tl.range(start, end, CHUNK):
        d = tl.load(diagonals + at + lanes, mask=at + lanes < end, other=0).to(tl.int32)
        kept = (d > 0) & (d % stride == residue)
        a = (d - residue) // stride
        word_at = row * words + (a >> 5)
        list_part(values, bits, before, start, word_at, a, kept)
        list_part(both_values, both_bits, both_before, start, word_at, a, kept)
        list_part(last_values, last_bits, last_before, start, word_at, a, kept)
        list_part(first_values, first_bits, first_before, start, word_at, a, kept)
    work = total
    if COLUMNS:
        work += ((tl.load(column_ptr + row + 1) - tl.load(column_ptr + row)) // T).to(tl.int32)
    tl.store(wide + row, (last_total <= gain * work).to(tl.int32))


@triton.jit
def columns_kernel(column_ptr, columns, segments, end, tile_row, tile_begin, patterns, q_blocks, q_stride, q_start,
                   TILE: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """How many columns lie before each query block of a row's segment, and the row's tiles of columns."""
    row = tl.program_id(0)
    segment, pattern = row // patterns, row % patterns
    start, stop = tl.load(column_ptr + row).to(tl.int32), tl.load(column_ptr + row + 1).to(tl.int32)
    lanes = tl.arange(0, CHUNK)
    first_tile = start // TILE + row  # leaves room for the unfinished tiles of the rows before
    count = (stop - start + TILE - 1) // TILE
    for at in tl.range(0, count, CHUNK):
        inside = at + lanes < count
        tl.store(tile_row + first_tile + at + lanes, row, mask=inside)
        tl.store(tile_begin + first_tile + at + lanes, (at + lanes) * TILE, mask=inside)
    blocks = tl.arange(0, T)
    low, high = tl.load(segments + 3 * segment), tl.load(segments + 3 * segment + 1)
    for first in tl.range(low, high, T):
        q_block = (first + blocks) * q_stride + q_start
        before = tl.zeros([T], tl.int32)
        for at in tl.range(start, stop, CHUNK):
            token = tl.load(columns + at + lanes, mask=at + lanes < stop, other=1 << 40)
            before += tl.sum((token[None, :] // T < q_block[:, None]).to(tl.int32), 1)
        tl.store(end + pattern * q_blocks + first + blocks, before, mask=first + blocks < high)
