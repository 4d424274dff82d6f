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


@triton.jit(do_not_specialize=["stride", "size", "words"])
def offsets_kernel(diagonal_ptr, diagonals, stride, size, words, values, bits, before, CHUNK: tl.constexpr):
    """Diagonals ``stride * a + residue`` but diagonal 0: a bitmap of a, counts before each of its words, and the list of a.

    Grid: (rows, stride). Each residue has its own ``size`` values and its own bitmaps.
    """
    row, residue = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values += residue.to(tl.int64) * size
    bits += residue.to(tl.int64) * tl.num_programs(0) * words
    before += residue.to(tl.int64) * tl.num_programs(0) * words
    start, end = tl.load(diagonal_ptr + row).to(tl.int32), tl.load(diagonal_ptr + row + 1).to(tl.int32)
    lanes = tl.arange(0, CHUNK)
    for at in tl.range(start, end, CHUNK):
        d = tl.load(diagonals + at + lanes, mask=at + lanes < end, other=0).to(tl.int32)
        a = (d - residue) // stride
        tl.atomic_or(bits + row * words + (a >> 5), 1 << (a & 31), mask=(d > 0) & (d % stride == residue))
    tl.debug_barrier()
    total = 0
    for w in tl.range(0, words, CHUNK):
        inside = w + lanes < words
        word_at = row * words + w + lanes
        count = count_bits(tl.load(bits + word_at, mask=inside, other=0).to(tl.uint32, bitcast=True))
        tl.store(before + word_at, total + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.debug_barrier()
    for at in tl.range(start, end, CHUNK):
        d = tl.load(diagonals + at + lanes, mask=at + lanes < end, other=0).to(tl.int32)
        kept = (d > 0) & (d % stride == residue)
        a = (d - residue) // stride
        entry_at = row * words + (a >> 5)
        word = tl.load(bits + entry_at, mask=kept, other=0)
        place = tl.load(before + entry_at, mask=kept, other=0) + bits_below(word, a & 31)
        tl.store(values + start + place, a, mask=kept)


@triton.jit(do_not_specialize=["patterns", "q_blocks", "q_stride", "q_start"])
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
