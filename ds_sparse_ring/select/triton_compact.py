"""Triton kernels that turn masses and marks into the rows of an index: a radix threshold, and ordered compaction.

Entries stand in blocks of 64; a *run* is the blocks of one (group, pattern), a chunk some blocks of the runs of one group (see
`tables`). Masses are compared by their bits (they are not negative; -1 marks entries that do not count) and added as 64-bit
integers in units of 2**-60, so that every order of addition, on one rank or on many, gives the same threshold.
"""

import triton
import triton.language as tl

from ds_sparse_ring.select import tables

RADIX_BITS = 4
LEVELS = 8  # 31 bits of a float that is not negative, in steps of RADIX_BITS
# columns of the state of a run
PREFIX, ABOVE_COUNT, ABOVE_MASS, GOAL, TIES, STATE_FIELDS = range(6)

_BINS = tl.constexpr(1 << RADIX_BITS)
_BITS = tl.constexpr(RADIX_BITS)
_GROUP_FIELDS = tl.constexpr(tables.GROUP_FIELDS)
_TARGET = tl.constexpr(tables.TARGET)
_LOCAL_BEGIN = tl.constexpr(tables.LOCAL_BEGIN)
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
    histogram,  # int64 [chunks, P, 2, BINS]: entries and their mass, by the next digit
    chunk_first,
    slot_first,
    P,
    shift,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Histogram of the digit above bit ``shift`` among the entries that share the prefix found so far. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P + chunk_first
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, SLOT, SIZE, OFFSETS)
    prefix = tl.load(state + (g * P + pattern) * _STATE)
    digit = tl.arange(0, _BINS)
    count = tl.zeros([_BINS], tl.int64)
    total = tl.zeros([_BINS], tl.int64)
    if wanted:
        for block in range(tl.load(chunks + c * 3 + 1), tl.load(chunks + c * 3 + 2)):
            value = tl.load(mass + (slot - slot_first + block) * 64 + tl.arange(0, 64))
            bits = value.to(tl.int32, bitcast=True).to(tl.int64)
            same = (value >= 0) & ((bits >> (shift + _BITS)) == (prefix >> (shift + _BITS)))
            hit = same[:, None] & (((bits >> shift) & (_BINS - 1))[:, None] == digit[None, :])
            count += tl.sum(hit.to(tl.int64), 0)
            total += tl.sum(tl.where(hit, _units(value)[:, None], 0), 0)
    out = histogram + pid * 2 * _BINS + digit
    tl.store(out, count)
    tl.store(out + _BINS, total)


@triton.jit
def radix_sum_kernel(histogram, groups, sums, group_first, chunk_first, P, BEGIN: tl.constexpr, END: tl.constexpr):
    """Sum of a run's chunks: ``sums`` int64 [runs, 2, BINS] from the runs of ``group_first`` on. Grid: runs."""
    pid = tl.program_id(0).to(tl.int64)
    group = groups + (group_first + pid // P) * _GROUP_FIELDS
    at = tl.arange(0, 2 * _BINS)
    total = tl.zeros([2 * _BINS], tl.int64)
    for c in range(tl.load(group + BEGIN), tl.load(group + END)):
        total += tl.load(histogram + ((c - chunk_first) * P + pid % P) * 2 * _BINS + at)
    tl.store(sums + pid * 2 * _BINS + at, total)


@triton.jit
def radix_step_kernel(
    sums,  # int64 [runs, 2, BINS]
    state,  # int64 [runs, STATE_FIELDS] of these runs
    share,  # float64 [1]: a float argument would be rounded to fp32
    low,
    high,
    shift,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """Descend to the digit in which the budget is reached; at the last one, say how many of the tied entries are kept.

    The budget is reached by the entries of most mass that hold at least ``share`` of it and number at least ``low``, or that
    number ``high``. What is never reached ends at the least entries, and keeps all. Grid: runs.
    """
    pid = tl.program_id(0).to(tl.int64)
    at = state + pid * _STATE
    digit = tl.arange(0, _BINS)
    count = tl.load(sums + pid * 2 * _BINS + digit)
    mass = tl.load(sums + pid * 2 * _BINS + _BINS + digit)
    prefix = tl.load(at)
    above_count = tl.load(at + 1)
    above_mass = tl.load(at + 2)
    goal = tl.load(at + 3)
    if FIRST:
        whole = tl.sum(mass, 0)
        goal = tl.minimum((whole.to(tl.float64) * tl.load(share)).to(tl.int64), whole)
        tl.store(at + 3, goal)
    # entries of this digit or a higher one
    lower = digit[:, None] <= digit[None, :]
    count_through = above_count + tl.sum(tl.where(lower, count[None, :], 0), 1)
    mass_through = above_mass + tl.sum(tl.where(lower, mass[None, :], 0), 1)
    enough = ((mass_through >= goal) & (count_through >= low)) | (count_through >= high)
    chosen = tl.maximum(tl.max(tl.where(enough, digit, -1), 0), 0)
    # never enough: the digit of the least entry, so that the tied ones are entries
    least = tl.min(tl.where(count > 0, digit, _BINS - 1), 0)
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
    state,  # int64 [G * P, STATE_FIELDS]
    above,  # int64, one word per slot: entries above the threshold
    tied,  # int64, one word per slot: entries on it
    chunk_first,
    slot_first,
    P,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Entries above and on the threshold as bits. Grid: chunks * P from ``chunk_first`` on."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P + chunk_first
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, SLOT, SIZE, OFFSETS)
    threshold = tl.load(state + (g * P + pattern) * _STATE)
    j = tl.arange(0, 64)
    bit = tl.full([64], 1, tl.int64) << j.to(tl.int64)
    if wanted:
        for block in range(tl.load(chunks + c * 3 + 1), tl.load(chunks + c * 3 + 2)):
            value = tl.load(mass + (slot - slot_first + block) * 64 + j)
            bits = value.to(tl.int32, bitcast=True).to(tl.int64)
            tl.store(above + slot + block, tl.sum(tl.where((value >= 0) & (bits > threshold), bit, 0), 0))
            tl.store(tied + slot + block, tl.sum(tl.where((value >= 0) & (bits == threshold), bit, 0), 0))


@triton.jit
def cut_ties_kernel(
    words,  # int64, one per slot: entries above the threshold; those that are kept of the tied ones are added
    tied,  # int64, one per slot
    before,  # int64, one per slot: tied entries in all slots before
    groups,
    chunks,
    state,
    P,
    SLOT: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Keep the first tied entries of every run, as many as the budget needs. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P
    pattern = pid % P
    g, slot, wanted = _run(chunks, groups, c, pattern, P, SLOT, SIZE, OFFSETS)
    keep = tl.load(state + (g * P + pattern) * _STATE + 4)
    j = tl.arange(0, 64).to(tl.int64)
    bit = tl.full([64], 1, tl.int64) << j
    if wanted:
        first_block = tl.load(groups + g * _GROUP_FIELDS + _LOCAL_BEGIN)
        if OFFSETS:
            first_block = first_block * 0
        start = tl.load(before + slot + first_block, mask=tl.load(groups + g * _GROUP_FIELDS + SIZE) > 0, other=0)
        for block in range(tl.load(chunks + c * 3 + 1), tl.load(chunks + c * 3 + 2)):
            word = tl.load(tied + slot + block)
            one = (word >> j) & 1
            rank = tl.load(before + slot + block) - start + tl.cumsum(one, 0) - one
            kept = tl.sum(tl.where((one > 0) & (rank < keep), bit, 0), 0)
            tl.store(words + slot + block, tl.load(words + slot + block) | kept)


@triton.jit
def sink_kernel(words, groups, chunks, key_blocks, P, SLOT: tl.constexpr, SIZE: tl.constexpr, SINK_END: tl.constexpr):
    """Set the bits of the forced sinks. Grid: chunks * P."""
    pid = tl.program_id(0).to(tl.int64)
    c = pid // P
    g, slot, wanted = _run(chunks, groups, c, pid % P, P, SLOT, SIZE, False)
    sink_end = tl.load(groups + g * _GROUP_FIELDS + SINK_END)
    j = tl.arange(0, 64)
    bit = tl.full([64], 1, tl.int64) << j.to(tl.int64)
    if wanted:
        for block in range(tl.load(chunks + c * 3 + 1), tl.load(chunks + c * 3 + 2)):
            token = tl.load(key_blocks + block) * 64 + j
            forced = tl.sum(tl.where(token < sink_end, bit, 0), 0)
            tl.store(words + slot + block, tl.load(words + slot + block) | forced)


@triton.jit
def count_kernel(words, counts, n, SIZE: tl.constexpr):
    """Bits that are set in each word: ``counts`` int64 [n + 1], 0 and theirs. Grid: n / SIZE."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    at = first + tl.arange(0, SIZE)
    word = tl.load(words + at, mask=at < n, other=0)
    word = word - ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + ((word >> 4) & 0x0F0F0F0F0F0F0F0F)) & 0x0F0F0F0F0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    word = word + (word >> 32)
    tl.store(counts + 1 + at, word & 0x7F, mask=at < n)
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
