"""Triton kernels that turn masses and marks into the rows of an index: a radix threshold, and ordered compaction.

Entries stand in blocks of 64; a *run* is the blocks of one (group, pattern), a chunk some blocks of the runs of one group (see
`tables`). Masses are compared by their bits (they are not negative; -1 marks entries that do not count) and added as 64-bit
integers in units of 2**-60, so that every order of addition, on one rank or on many, gives the same threshold.
"""

import triton
import triton.language as tl
from torch import Tensor

from ds_sparse_ring.select import tables

# the 31 bits of a float that is not negative, in steps of so many
COUNT_BITS = 8  # where entries are only counted
MASS_BITS = 4  # where masses are added, too: there is no histogram of weights
# columns of the state of a run
PREFIX, ABOVE_COUNT, ABOVE_MASS, GOAL, TIES, STATE_FIELDS = range(6)

_GROUP_FIELDS = tl.constexpr(tables.GROUP_FIELDS)
_TARGET = tl.constexpr(tables.TARGET)
_LOCAL_BEGIN = tl.constexpr(tables.LOCAL_BEGIN)
_SLOT = tl.constexpr(tables.SLOT)
_TILES = tl.constexpr(tables.TILES)
_DOCUMENT_BEGIN = tl.constexpr(tables.DOCUMENT_BEGIN)
_KEY_END = tl.constexpr(tables.KEY_END)
_REACH = tl.constexpr(tables.REACH)
_REACH_SLOT = tl.constexpr(tables.REACH_SLOT)
_STATE = tl.constexpr(STATE_FIELDS)
_UNIT = tl.constexpr(float(2**60))


@triton.jit
def _units(mass):
    """Masses in integer units."""
    return (mass.to(tl.float64) * _UNIT).to(tl.int64)


@triton.jit
def _run(chunks, groups, c, pattern, P, SLOT: tl.constexpr, SIZE: tl.constexpr, OFFSETS: tl.constexpr):
    """Group of a chunk, and the slot of its block 0 (as the chunk counts blocks) for a pattern; -1 for group without target."""
    g = tl.load(chunks + c * 3)
    group = groups + g * _GROUP_FIELDS
    slot = tl.load(group + SLOT) * P + pattern * tl.load(group + SIZE)
    if not OFFSETS:
        slot -= tl.load(group + _LOCAL_BEGIN)
    return g, slot, tl.load(group + _TARGET) >= 0


@triton.jit
def radix_count_kernel(
    mass,  # fp32, from slot ``slot_first`` on
    groups,
    chunks,
    state,  # int64 [G * P, STATE_FIELDS]
    histogram,  # int64 [chunks, P, 1, 2**BITS]: entries by the next digit; with MASS: [chunks, P, 2, 2**BITS], and their mass
    chunk_first,
    slot_first,
    P,
    shift,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSETS: tl.constexpr,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Histogram of the digit above bit ``shift`` among the entries that share the prefix found so far. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P + chunk_first
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, SLOT, SIZE, OFFSETS)
    prefix = tl.load(state + (g * P + pattern) * _STATE).to(tl.int32)
    digit = tl.arange(0, 1 << BITS)
    count = tl.zeros([1 << BITS], tl.int64)
    total = tl.zeros([1 << BITS], tl.int64)
    if wanted:
        first = tl.load(chunks + c * 3 + 1) * 64
        last = tl.load(chunks + c * 3 + 2) * 64
        run = mass + (slot - slot_first) * 64
        for begin in range(first, last, BLOCKS * 64):
            at = begin + tl.arange(0, BLOCKS * 64)
            value = tl.load(run + at, mask=at < last, other=-1.0)
            bits = value.to(tl.int32, bitcast=True)
            # two shifts: by 32 bits at a time it is not defined
            same = (value >= 0) & (((bits >> shift) >> BITS) == ((prefix >> shift) >> BITS))
            own = (bits >> shift) & ((1 << BITS) - 1)
            if MASS:
                hit = same[:, None] & (own[:, None] == digit[None, :])
                count += tl.sum(hit.to(tl.int64), 0)
                total += tl.sum(tl.where(hit, _units(value)[:, None], 0), 0)
            else:
                count += tl.histogram(own, 1 << BITS, mask=same)
    if MASS:
        out = histogram + (pid << (BITS + 1)) + digit
        tl.store(out + (1 << BITS), total)
    else:
        out = histogram + (pid << BITS) + digit
    tl.store(out, count)


@triton.jit
def _chunk_sum(histogram, run, first, last, P, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Sum of the histograms [first, last) of a run, [WIDTH]; they stand P apart, the first chunk's runs in front."""
    digit = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int64)
    for begin in range(first, last, CHUNKS):
        c = begin + tl.arange(0, CHUNKS)
        part = tl.load(histogram + (c * P + run)[:, None] * WIDTH + digit[None, :], mask=c[:, None] < last, other=0)
        total += tl.sum(part, 0)
    return total


@triton.jit
def radix_sum_kernel(
    histogram,
    groups,
    sums,  # int64 [runs, WIDTH] from the runs of ``group_first`` on
    group_first,
    chunk_first,
    P,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Sum of a run's chunks, where those of other ranks are added before the step. Grid: runs."""
    pid = tl.program_id(0).to(tl.int64)
    group = groups + (group_first + pid // P) * _GROUP_FIELDS
    first = tl.load(group + BEGIN) - chunk_first
    last = tl.load(group + END) - chunk_first
    total = _chunk_sum(histogram, pid % P, first, last, P, WIDTH, CHUNKS)
    tl.store(sums + pid * WIDTH + tl.arange(0, WIDTH), total)


@triton.jit
def radix_step_kernel(
    histogram,  # int64, as `radix_count_kernel` writes them; with SUMMED: as `radix_sum_kernel` does
    groups,
    state,  # int64 [runs, STATE_FIELDS] of the runs of ``group_first`` on
    share,  # float64 [1]: a float argument would be rounded to fp32
    low,
    high,
    group_first,
    chunk_first,
    P,
    shift,
    BEGIN: tl.constexpr,
    END: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
    SUMMED: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Descend to the digit in which the budget is reached; at the last one, say how many of the tied entries are kept.

    The budget is reached by the entries of most mass that hold at least ``share`` of it (nothing without MASS) and number at
    least ``low``, or that number ``high``. What is never reached ends at the least entries, and keeps all. Grid: runs.
    """
    pid = tl.program_id(0).to(tl.int64)
    at = state + pid * _STATE
    digit = tl.arange(0, 1 << BITS)
    kinds: tl.constexpr = 2 if MASS else 1
    run = pid % P
    first = pid // P
    last = first + 1
    if not SUMMED:
        group = groups + (group_first + pid // P) * _GROUP_FIELDS
        first = tl.load(group + BEGIN) - chunk_first
        last = tl.load(group + END) - chunk_first
    # counts and masses stand behind one another: twice as many histograms, each of half the width
    count = _chunk_sum(histogram, kinds * run, first, last, kinds * P, 1 << BITS, CHUNKS)
    mass = count * 0
    if MASS:
        mass = _chunk_sum(histogram, kinds * run + 1, first, last, kinds * P, 1 << BITS, CHUNKS)
    prefix = tl.load(at)
    above_count = tl.load(at + 1)
    above_mass = tl.load(at + 2)
    goal = tl.load(at + 3)
    if FIRST and MASS:
        whole = tl.sum(mass, 0)
        goal = tl.minimum((whole.to(tl.float64) * tl.load(share)).to(tl.int64), whole)
        tl.store(at + 3, goal)
    # entries of this digit or a higher one
    count_through = above_count + tl.sum(count, 0) - tl.cumsum(count, 0) + count
    mass_through = above_mass + tl.sum(mass, 0) - tl.cumsum(mass, 0) + mass
    enough = ((mass_through >= goal) & (count_through >= low)) | (count_through >= high)
    chosen = tl.maximum(tl.max(tl.where(enough, digit, -1), 0), 0)
    # never enough: the digit of the least entry, so that the tied ones are entries
    least = tl.min(tl.where(count > 0, digit, (1 << BITS) - 1), 0)
    chosen = tl.where(tl.max(enough.to(tl.int32), 0) > 0, chosen, least)
    above_count += tl.sum(tl.where(digit > chosen, count, 0), 0)
    above_mass += tl.sum(tl.where(digit > chosen, mass, 0), 0)
    prefix = prefix | (chosen.to(tl.int64) << shift)
    tl.store(at, prefix)
    tl.store(at + 1, above_count)
    tl.store(at + 2, above_mass)
    if LAST:
        tied = tl.sum(tl.where(digit == chosen, count, 0), 0)
        each = tl.maximum(_units(prefix.to(tl.int32).to(tl.float32, bitcast=True)), 1)
        by_mass = tl.maximum(goal - above_mass + each - 1, 0) // each
        keep = tl.minimum(tl.maximum(by_mass, low - above_count), high - above_count)
        tl.store(at + 4, tl.minimum(tl.maximum(keep, 0), tied))


@triton.jit
def mark_kernel(
    mass,  # fp32, from slot ``slot_first`` on
    groups,
    chunks,
    key_blocks,
    state,  # int64 [G * P, STATE_FIELDS]
    above,  # int64, one word per slot: entries above the threshold, and sinks, which are forced
    tied,  # int64, one word per slot: entries on it
    chunk_first,
    slot_first,
    P,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSETS: tl.constexpr,
    SINK_END: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Entries above and on the threshold as bits. Grid: chunks * P from ``chunk_first`` on."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P + chunk_first
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, SLOT, SIZE, OFFSETS)
    threshold = tl.load(state + (g * P + pattern) * _STATE)  # of no entries at all: more than 31 bits
    sink_end = tl.load(groups + g * _GROUP_FIELDS + SINK_END)
    j = tl.arange(0, 64)
    bit = tl.full([64], 1, tl.int64) << j.to(tl.int64)
    if wanted:
        last = tl.load(chunks + c * 3 + 2)
        for first in range(tl.load(chunks + c * 3 + 1), last, BLOCKS):
            block = first + tl.arange(0, BLOCKS)
            at = (slot - slot_first + block)[:, None] * 64 + j[None, :]
            value = tl.load(mass + at, mask=block[:, None] < last, other=-1.0)
            bits = value.to(tl.int32, bitcast=True).to(tl.int64)
            over = (value >= 0) & (bits > threshold)
            if not OFFSETS:
                token = tl.load(key_blocks + block, mask=block < last, other=0)[:, None] * 64 + j[None, :]
                over = over | (token < sink_end)
            on = (value >= 0) & (bits == threshold)
            tl.store(above + slot + block, tl.sum(tl.where(over, bit[None, :], 0), 1), mask=block < last)
            tl.store(tied + slot + block, tl.sum(tl.where(on, bit[None, :], 0), 1), mask=block < last)


@triton.jit
def _global_slot(group, pattern, P):
    """Slot of block 0 of a run, as layouts count blocks, among the slots of all blocks that the probes reach on any rank."""
    return tl.load(group + _REACH_SLOT) * P + pattern * tl.load(group + _REACH) - tl.load(group + _DOCUMENT_BEGIN)


@triton.jit
def tie_count_kernel(
    tied,  # int64, one word per slot of a key block
    groups,
    chunks,
    key_blocks,
    counts,  # int64, a zero and one per slot of a block on any rank: set where this rank holds the block
    P,
    BLOCKS: tl.constexpr,
):
    """How many keys of each block are tied. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, _SLOT, _TILES, False)
    group = groups + g * _GROUP_FIELDS
    if wanted:
        out = counts + 1 + _global_slot(group, pattern, P)
        key_end = tl.load(group + _KEY_END)
        last = tl.load(chunks + c * 3 + 2)
        for first in range(tl.load(chunks + c * 3 + 1), last, BLOCKS):
            local = first + tl.arange(0, BLOCKS)
            word = tl.load(tied + slot + local, mask=local < last, other=0)
            block = tl.load(key_blocks + local, mask=local < last, other=0)
            tl.store(out + block, _bit_count(word), mask=(local < last) & (block < key_end))


@triton.jit
def cut_ties_kernel(
    words,  # int64, one per slot: entries above the threshold; those that are kept of the tied ones are added
    tied,  # int64, one per slot
    before,  # int64, one per slot of a block on any rank: tied entries in all slots before
    groups,
    chunks,
    key_blocks,
    state,
    P,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Keep the first tied entries of every run, over all ranks, as many as the budget needs. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, SLOT, SIZE, OFFSETS)
    keep = tl.load(state + (g * P + pattern) * _STATE + 4)
    j = tl.arange(0, 64).to(tl.int64)
    bit = tl.full([64], 1, tl.int64) << j
    group = groups + g * _GROUP_FIELDS
    if wanted:
        document_begin = tl.load(group + _DOCUMENT_BEGIN)
        key_end = tl.load(group + _KEY_END)
        before += _global_slot(group, pattern, P)
        start = tl.load(before + document_begin)
        last = tl.load(chunks + c * 3 + 2)
        for first in range(tl.load(chunks + c * 3 + 1), last, BLOCKS):
            local = first + tl.arange(0, BLOCKS)
            word = tl.load(tied + slot + local, mask=local < last, other=0)
            if OFFSETS:
                block = document_begin + local
            else:
                block = tl.load(key_blocks + local, mask=local < last, other=0)
            earlier = tl.load(before + block, mask=(local < last) & (block < key_end), other=0) - start
            one = (word[:, None] >> j[None, :]) & 1
            rank = earlier[:, None] + tl.cumsum(one, 1) - one
            kept = tl.sum(tl.where((one > 0) & (rank < keep), bit[None, :], 0), 1)
            at = words + slot + local
            tl.store(at, tl.load(at, mask=local < last, other=0) | kept, mask=local < last)


@triton.jit
def _bit_count(word):
    """Bits that are set in 64-bit words."""
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + ((word >> 4) & 0x0F0F0F0F0F0F0F0F)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    word = word + (word >> 32)
    return word & 0x7F


@triton.jit
def count_kernel(words, counts, n, SIZE: tl.constexpr):
    """Bits that are set in each word: ``counts`` int64 [n + 1], 0 and theirs. Grid: n / SIZE."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = first + tl.arange(0, SIZE)
    word = tl.load(words + at, mask=at < n, other=0)
    tl.store(counts + 1 + at, _bit_count(word), mask=at < n)
    tl.store(counts, tl.zeros([], tl.int64), mask=first == 0)


@triton.jit(do_not_specialize=["groups"])
def summary_kernel(columns, diagonals, refused, groups, out, SIZE: tl.constexpr):
    """What the host waits for: int64 [3], numbers of columns and diagonals and whether a group was refused. Grid: 1."""
    some = tl.zeros([SIZE], tl.int64)
    for first in range(0, groups, SIZE):
        at = first + tl.arange(0, SIZE)
        some = tl.maximum(some, tl.load(refused + at, mask=at < groups, other=0))
    tl.store(out, tl.load(columns))
    tl.store(out + 1, tl.load(diagonals))
    tl.store(out + 2, tl.max(some, 0))


@triton.jit
def fill_columns_kernel(
    words,
    before,  # int64 [W + 1]: columns in all slots before
    groups,
    chunks,
    key_blocks,
    values,  # int64 [room]: tokens, ascending within each row
    room,
    P,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Write the tokens whose bits are set, in order, as many as there is room for. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P
    g, slot, wanted = _run(chunks, groups, c, pid % P, P, SLOT, SIZE, False)
    j = tl.arange(0, 64)
    if wanted:
        last = tl.load(chunks + c * 3 + 2)
        for first in range(tl.load(chunks + c * 3 + 1), last, WORDS):
            block = first + tl.arange(0, WORDS)
            word = tl.load(words + slot + block, mask=block < last, other=0)
            place = tl.load(before + slot + block, mask=block < last, other=0)
            token = tl.load(key_blocks + block, mask=block < last, other=0)[:, None] * 64 + j[None, :]
            one = ((word[:, None] >> j[None, :].to(tl.int64)) & 1).to(tl.int32)
            at = place[:, None] + tl.cumsum(one, 1) - one
            tl.store(values + at, token, mask=(one > 0) & (at < room))


@triton.jit
def fill_diagonals_kernel(
    flags,  # int64, a zero and one per slot of a diagonal
    before,  # int64 [slots + 1]: diagonals in all slots before
    segments,
    tiles,
    values,  # int64 [diagonals]: offsets, ascending within each row
    P,
    FIELDS: tl.constexpr,
    REACH: tl.constexpr,
    SLOT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write the offsets that are on, in order. Grid: tiles * P."""
    pid = tl.program_id(0).to(tl.int64)
    t = pid // P
    segment = segments + tl.load(tiles + t * 2) * FIELDS
    reach = tl.load(segment + REACH)
    offset = tl.load(tiles + t * 2 + 1) + tl.arange(0, TILE)
    at = tl.load(segment + SLOT) * P + pid % P * reach + offset
    on = tl.load(flags + 1 + at, mask=offset < reach, other=0) > 0
    tl.store(values + tl.load(before + at, mask=on, other=0), offset, mask=on)


def bits_before(words: Tensor) -> Tensor:
    """Bits set in all words before each one, and in all of them: int64, one longer than ``words``."""
    if not words.numel():
        return words.new_zeros(1)
    counts = words.new_empty(words.numel() + 1)
    count_kernel[(-(-words.numel() // 1024),)](words, counts, words.numel(), SIZE=1024)
    return counts.cumsum(0)
