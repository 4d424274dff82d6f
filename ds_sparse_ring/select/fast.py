"""Selection by Triton kernels: the same index as the reference selectors make, without waiting for the device in between.

All segments and heads share each launch. The host waits once per layer, for a summary of three numbers (columns, diagonals,
whether scores are finite), because the tensors of an index are as long as what was chosen; on a ring, for the summaries of all
ranks, whose columns differ in number.

Selection by price scores the keys twice: for the log-sum-exp of the rows, and for the masses. In long sequences the first pass
also bounds the mass of every key block, and the second one visits only blocks that can hold a column or give rise to a diagonal:
the same index, bit for bit. It takes memory in proportion to segments x patterns x blocks: one bit per token and some 70 bytes
per block of keys.

Selection by mass scores the keys twice as well, the second time for columns and token diagonals at once: 1 KiB per key block and
pattern is written for its diagonals, and never a tensor of rows x keys. It keeps the masses of a few segments at a time.

Both write the index into buffers of the most that it may hold before the host waits, and cut it to length afterwards, by a copy
where they are large.

Shapes as in `triton_probe`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.config import FixedSelector, PriceSelector, TopPSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VALUE_BITS, VerticalSlash, row_of_entries
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import tables as fields
from ds_sparse_ring.select import triton_compact as compact
from ds_sparse_ring.select import triton_probe as kernels
from ds_sparse_ring.select.mass import Budget, budgets
from ds_sparse_ring.select.probe import NOT_FINITE
from ds_sparse_ring.select.tables import Tables, tables_of

_NO_BOUND = 1 << 62
_ENTRIES = 1 << 25  # tokens that selection by mass ranks at a time: 24 bytes each (masses, parts of diagonals), 768 MiB
_ROOM = 1 << 23  # columns that are written before their number is known: 64 MiB
_KEPT = 1 << 20  # bytes that an index may keep beside its values
_BOUNDED_BLOCKS = 1024  # sequences of so many blocks are worth finding out which of them need a second look
_WARPS = 4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class _Kind:
    """What selection by mass chooses from, as columns of `Tables.groups`: first slot and slots, range of chunks."""

    slot: int
    size: int
    begin: int
    end: int
    offsets: bool

    def chunks(self, tables: Tables) -> Tensor:
        """``[C, 3]``."""
        return tables.offset_chunks if self.offsets else tables.chunks

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time arguments of the kernels that walk over runs."""
        return {"SLOT": self.slot, "SIZE": self.size, "OFFSETS": self.offsets}


_COLUMNS = _Kind(fields.SLOT, fields.TILES, fields.CHUNK_BEGIN, fields.CHUNK_END, False)
_OFFSETS = _Kind(fields.REACH_SLOT, fields.REACH, fields.OFFSET_CHUNK_BEGIN, fields.OFFSET_CHUNK_END, True)


@dataclass(frozen=True)
class _Bounds:
    """Bounds of the mass of key blocks: most have too little to hold anything that selection by price keeps.

    Attributes:
        anchors: fp32 ``[H, G * R]``, log-sum-exp over a few key blocks: a lower bound of that over all.
        sums: fp32, one per head and key block of each group: its exponentials relative to the anchors, summed over the rows.
    """

    anchors: Tensor
    sums: Tensor


@dataclass(frozen=True)
class _Probe:
    """The probes of all segments: their rows, gathered on every rank, their log-sum-exp (base 2), and how to launch on them."""

    q_rows: Tensor
    k: Tensor
    lse: Tensor
    tables: Tables
    context: SequenceContext
    patterns: int
    scale2: float
    bounds: _Bounds | None

    @property
    def strides(self) -> tuple[int, int]:
        """Of a head and of a token of k."""
        return self.k.stride(0), self.k.stride(1)

    @property
    def groups(self) -> int:
        """G."""
        return self.tables.groups.shape[0]

    @property
    def options(self) -> dict[str, Any]:
        """Compile-time arguments of the kernels that score the rows of patterns."""
        heads = self.context.config.heads_per_pattern
        return {"HPP": heads, **_options(self.q_rows, self.k, heads)}

    @property
    def together(self) -> int:
        """Heads of a pattern that are scored together."""
        return together(self.q_rows.shape[2], self.q_rows.element_size(), self.context.config.heads_per_pattern)


def select_fast(
    q: Tensor, k: Tensor, context: SequenceContext, scale: float, selector: PriceSelector | TopPSelector | FixedSelector
) -> VerticalSlash:
    """Columns and diagonals of all segments, forced ones included. Collective over the ring.

    Args:
        q: ``[H, n, D]`` float16, bfloat16 or float32; k: ``[K, n, D]`` of the same dtype, on the same device.

    Returns:
        The index that the reference selectors make, but for entries within rounding of the threshold; the same bits on every
        rank and in every run.

    Raises:
        SparseRingError: a score is NaN or infinite, or the dtype is another one.
    """
    if q.dtype not in _DTYPES or k.dtype != q.dtype:
        raise SparseRingError(f'selection: Triton does not choose from {q.dtype} and {k.dtype}; method="reference" does')
    with torch.cuda.device_of(q):
        bounded = isinstance(selector, PriceSelector) and context.segments[-1].end >= _BOUNDED_BLOCKS
        probe, refused = _probe(q, k, context, scale, bounded)
        if isinstance(selector, PriceSelector):
            words, flags = _by_price(probe, selector.price)
        else:
            words, flags = _by_mass(probe, selector)
        return _index(probe, words, flags, refused)


def launch_options(head_size: int, element_bytes: int, heads: int = 1) -> dict[str, int]:
    """Head size, warps and stages of the kernels that score the rows of patterns of ``heads`` heads."""
    # a third stage, of keys and of the rows of more heads than are scored together, would leave one program to a multiprocessor
    wide = head_size * element_bytes > 256 or heads > 2
    return {
        "D": head_size,
        "BLOCK_D": max(16, 1 << (head_size - 1).bit_length()),
        "num_warps": _WARPS,
        "num_stages": 2 if wide else 3,
    }


def mass_options(head_size: int, element_bytes: int) -> dict[str, int]:
    """Warps and registers of `mass_kernel`: its turned tile needs twice the threads; two programs to a multiprocessor."""
    limit = head_size * element_bytes <= 256 and torch.version.hip is None
    return {"num_warps": 2 * _WARPS} | ({"maxnreg": 128} if limit else {})


def together(head_size: int, element_bytes: int, heads: int) -> int:
    """Heads whose rows share a tile of keys: two, where they are even in number and the rows fit beside the keys."""
    return 2 if heads % 2 == 0 and head_size * element_bytes <= 256 else 1


def _options(q: Tensor, k: Tensor, heads: int = 1) -> dict[str, Any]:
    return {"GROUP": q.shape[0] // k.shape[0], **launch_options(q.shape[2], q.element_size(), heads)}


def _probe(q: Tensor, k: Tensor, context: SequenceContext, scale: float, bounded: bool) -> tuple[_Probe, Tensor]:
    """Rows and log-sum-exp of all probes; and flags on the device: some score is not finite."""
    patterns = q.shape[0] // context.config.heads_per_pattern
    tables = tables_of(context, patterns, q.device)
    k = k if k.stride(2) == 1 else k.contiguous()
    q_rows = q.index_select(1, tables.rows)
    if context.axes.ring_size > 1:  # every row has one owner and zeros elsewhere, so the sum is exact in any dtype
        q_rows = context.axes.ring_sum(torch.where(tables.held[:, None], q_rows, 0))
    scale2 = scale * math.log2(math.e)
    bounds = None
    if bounded:
        largest, total = _log_sum_exp(q_rows, k, tables, tables.anchor_chunks, scale2, None)
        anchors = context.axes.ring_max(_row_sums(largest, total, tables)[0])
        bounds = _Bounds(anchors, anchors.new_empty(tables.column_slots // patterns * q.shape[0]))
    largest, total = _log_sum_exp(q_rows, k, tables, tables.chunks, scale2, bounds)
    if context.axes.ring_size > 1:
        local = largest.clone()
        largest = context.axes.ring_max(largest)
        total *= (local - largest).exp2()
        total = context.axes.ring_sum(total)
    lse, refused = _row_sums(largest, total, tables)
    return _Probe(q_rows, k, lse, tables, context, patterns, scale2, bounds), refused


def _row_sums(largest: Tensor, total: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Log-sum-exp, +inf for rows that are not valid, and which groups' are not finite: int64 ``[H, G]``."""
    heads, groups = largest.shape[0], tables.groups.shape[0]
    lse, refused = torch.empty_like(largest), tables.groups.new_empty(heads, groups)
    kernels.lse_kernel[(groups, heads)](largest, total, tables.valid, lse, refused, groups)
    return lse, refused


def _log_sum_exp(
    q_rows: Tensor, k: Tensor, tables: Tables, chunks: Tensor, scale2: float, bounds: _Bounds | None
) -> tuple[Tensor, Tensor]:
    """Maxima of the rows over this rank's keys, and sums of exponentials relative to them: fp32 ``[H, G * R]`` each.

    Args:
        chunks: all keys, or those of the anchors. bounds: filled in where given.
    """
    heads, count, groups = q_rows.shape[0], chunks.shape[0], tables.groups.shape[0]
    options = _options(q_rows, k)
    at_once = together(q_rows.shape[2], q_rows.element_size(), options["GROUP"])
    parts = q_rows.new_empty(2, count, heads, BLOCK, dtype=torch.float32)
    anchors, sums = (bounds.anchors, bounds.sums) if bounds is not None else (parts, parts)
    kernels.lse_chunk_kernel[(count * (heads // at_once),)](
        q_rows, k, tables.groups, chunks, tables.key_blocks, parts[0], parts[1], anchors, sums, k.stride(0), k.stride(1), scale2,
        groups, heads, HEADS=at_once, BOUND=bounds is not None, **options,
    )  # fmt: skip
    out = q_rows.new_empty(2, heads, groups * BLOCK, dtype=torch.float32)
    whole = chunks is tables.chunks
    kernels.lse_merge_kernel[(groups, heads)](
        parts[0], parts[1], tables.groups, out[0], out[1], groups, heads,
        BEGIN=fields.CHUNK_BEGIN if whole else fields.ANCHOR_BEGIN, END=fields.CHUNK_END if whole else fields.ANCHOR_END,
        CHUNKS=64,
    )  # fmt: skip
    return out[0], out[1]


def _by_price(probe: _Probe, price: float) -> tuple[Tensor, Tensor]:
    """Words of columns (sinks included) and flags of diagonals, behind a zero."""
    t, patterns = probe.tables, probe.patterns
    words = t.groups.new_empty(t.column_slots)
    partials = probe.lse.new_empty(t.column_slots, 4)
    needed = _needed(probe, probe.bounds, price) if probe.bounds is not None else words
    # three programs to a multiprocessor, found to fit without spilling
    small = probe.together == 1 and probe.k.shape[2] * probe.k.element_size() <= 256
    registers = {"maxnreg": 168} if small and torch.version.hip is None else {}
    kernels.price_kernel[(t.chunks.shape[0] * patterns,)](
        probe.q_rows, probe.k, probe.lse, t.groups, t.chunks, t.key_blocks, words, partials, needed, t.segments, *probe.strides,
        probe.scale2, price, probe.context.config.local_blocks, probe.groups, patterns, HEADS=probe.together,
        SKIP=probe.bounds is not None, **probe.options, **registers,
    )  # fmt: skip
    mass = probe.lse.new_empty(t.diagonal_slots)
    grid = (t.diagonal_tiles.shape[0] * patterns,)
    kernels.diagonal_mass_kernel[grid](partials, t.groups, t.segments, t.diagonal_tiles, t.local_of, mass, patterns)
    mass = probe.context.axes.ring_sum(mass)
    flags = words.new_empty(t.diagonal_slots + 1)
    kernels.diagonal_flag_kernel[grid](
        mass, t.groups, t.segments, t.diagonal_tiles, flags, BLOCK * price, patterns, WORDS=False
    )  # fmt: skip
    return words, flags


def _needed(probe: _Probe, bounds: _Bounds, price: float) -> Tensor:
    """Which key blocks can hold a column or give rise to a diagonal: int8, one per slot of a diagonal."""
    t, patterns = probe.tables, probe.patterns
    grid = (t.diagonal_tiles.shape[0] * patterns,)
    most = probe.lse.new_empty(t.diagonal_slots)
    kernels.bound_kernel[grid](
        bounds.sums, bounds.anchors, probe.lse, t.groups, t.segments, t.diagonal_tiles, t.local_of, most, probe.groups, patterns,
        HPP=probe.context.config.heads_per_pattern,
    )  # fmt: skip
    most = probe.context.axes.ring_sum(most)
    needed = most.new_empty(t.diagonal_slots, dtype=torch.int8)
    kernels.needed_kernel[grid](most, t.segments, t.diagonal_tiles, needed, price, patterns)
    return needed


def _by_mass(probe: _Probe, selector: TopPSelector | FixedSelector) -> tuple[Tensor, Tensor]:
    """Words of columns (sinks included) and flags of diagonals, behind a zero."""
    t, patterns = probe.tables, probe.patterns
    column_budget, offset_budget = budgets(selector)
    columns = _Marks.empty(t, t.column_slots, patterns, _COLUMNS, column_budget)
    offsets = _Marks.empty(t, t.offset_slots, patterns, _OFFSETS, offset_budget)
    for first, last in _slices(t, patterns * BLOCK):
        column_mass, offset_mass = _masses(probe, first, last)
        _mark(probe, columns, column_mass, first, last, shared=probe.context.axes.ring_size > 1)
        _mark(probe, offsets, offset_mass, first, last, shared=False)
    _cut_ties(probe, columns, _tied_before(probe, columns))
    _cut_ties(probe, offsets, _bits_before(offsets.tied))
    flags = columns.words.new_empty(t.diagonal_slots + 1)
    kernels.diagonal_flag_kernel[(t.diagonal_tiles.shape[0] * patterns,)](
        offsets.words, t.groups, t.segments, t.diagonal_tiles, flags, 0.0, patterns, WORDS=True
    )  # fmt: skip
    return columns.words, flags


@dataclass(frozen=True)
class _Marks:
    """Bits of the entries above the threshold and on it, one word per slot, and the thresholds (see `radix_step_kernel`)."""

    words: Tensor
    tied: Tensor
    state: Tensor
    kind: _Kind
    budget: Budget

    @classmethod
    def empty(cls, tables: Tables, slots: int, patterns: int, kind: _Kind, budget: Budget) -> _Marks:
        """Room for the marks of all groups."""
        words = tables.groups.new_empty(2, slots)
        state = tables.groups.new_zeros(tables.groups.shape[0] * patterns, compact.STATE_FIELDS)
        return cls(words[0], words[1], state, kind, budget)


def _slices(tables: Tables, per_block: int) -> Iterator[tuple[int, int]]:
    """Runs of groups ``[first, last)`` that take at most _ENTRIES entries together, or single ones."""
    first, taken = 0, 0
    for g, group in enumerate(tables.host_groups):
        size = max(group[fields.TILES], group[fields.REACH]) * per_block
        if taken and taken + size > _ENTRIES:
            yield first, g
            first, taken = g, 0
        taken += size
    yield first, len(tables.host_groups)


@dataclass(frozen=True)
class _Part:
    """Chunks and slots (per pattern) of a slice of groups."""

    chunk_first: int
    chunks: int
    slot_first: int
    slots: int


def _part(tables: Tables, first: int, last: int, kind: _Kind) -> _Part:
    groups = tables.host_groups[first:last]
    chunk_first, slot_first = groups[0][kind.begin], groups[0][kind.slot]
    slots = sum(group[kind.size] for group in groups if group[fields.TARGET] >= 0)
    return _Part(chunk_first, groups[-1][kind.end] - chunk_first, slot_first, slots)


def _masses(probe: _Probe, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Mean probability of this rank's keys and mass of token diagonals over all ranks' for the groups [first, last).

    fp32, 64 per slot each. What a key block adds to its diagonals is written once, 1 KiB per slot, and read once.
    """
    t, patterns, shared = probe.tables, probe.patterns, probe.context.axes.ring_size > 1
    keys, offsets = _part(t, first, last, _COLUMNS), _part(t, first, last, _OFFSETS)
    columns = probe.lse.new_empty(keys.slots * patterns * BLOCK)
    diagonals = t.groups.new_empty(keys.slots * patterns * 2 * BLOCK)
    if keys.chunks:
        options = probe.options | mass_options(probe.k.shape[2], probe.k.element_size())
        kernels.mass_kernel[(keys.chunks * patterns,)](
            probe.q_rows, probe.k, probe.lse, t.groups, t.chunks, t.key_blocks, columns, diagonals, *probe.strides, probe.scale2,
            keys.chunk_first, keys.slot_first * patterns, probe.groups, patterns, **options,
        )  # fmt: skip
    mass = (diagonals if shared else columns).new_empty(offsets.slots * patterns * BLOCK)
    kernels.offset_mass_kernel[(offsets.chunks * patterns,)](
        diagonals, t.groups, t.offset_chunks, t.local_of, mass, offsets.chunk_first, keys.slot_first * patterns,
        offsets.slot_first * patterns, patterns, SHARED=shared, BLOCKS=8,
    )  # fmt: skip
    if shared:  # integers: the same sum, in whatever order NCCL adds the ranks
        mass = probe.context.axes.ring_sum(mass).to(torch.float32).mul_(kernels.MEAN)
    return columns, mass


def _mark(probe: _Probe, marks: _Marks, mass: Tensor, first: int, last: int, *, shared: bool) -> None:
    """Find the thresholds of the runs of groups [first, last) and mark the entries above and on them.

    Args:
        mass: of these groups, fp32, 64 per slot. shared: the ranks of the ring hold different entries of the same runs.
    """
    t, patterns, kind, budget = probe.tables, probe.patterns, marks.kind, marks.budget
    part, chunks = _part(t, first, last, kind), kind.chunks(t)
    runs, weighed = (last - first) * patterns, budget.p > 0
    state = marks.state[first * patterns : last * patterns]
    share = torch.full((1,), budget.p, dtype=torch.float64, device=mass.device) if weighed else state
    bits = compact.MASS_BITS if weighed else compact.COUNT_BITS
    width = (2 if weighed else 1) << bits
    histogram = chunks.new_empty(part.chunks * patterns * width)
    high = _NO_BOUND if budget.high is None else budget.high
    walk = {"BEGIN": kind.begin, "END": kind.end, "CHUNKS": 16}
    digits = {"BITS": bits, "MASS": weighed}
    for shift in reversed(range(0, 31, bits)):
        if part.chunks:
            compact.radix_count_kernel[(part.chunks * patterns,)](
                mass, t.groups, chunks, marks.state, histogram, part.chunk_first, part.slot_first * patterns, patterns, shift,
                BLOCKS=1 if weighed else 16, **kind.options, **digits,
            )  # fmt: skip
        counts = histogram
        if shared:
            counts = chunks.new_empty(runs, width)
            compact.radix_sum_kernel[(runs,)](histogram, t.groups, counts, first, part.chunk_first, patterns, WIDTH=width, **walk)
            counts = probe.context.axes.ring_sum(counts)
        compact.radix_step_kernel[(runs,)](
            counts, t.groups, state, share, budget.low, high, first, part.chunk_first, patterns, shift,
            FIRST=shift + bits > 30, LAST=shift == 0, SUMMED=shared, **walk, **digits,
        )  # fmt: skip
    if part.chunks:
        compact.mark_kernel[(part.chunks * patterns,)](
            mass, t.groups, chunks, t.key_blocks, marks.state, marks.words, marks.tied, part.chunk_first,
            part.slot_first * patterns, patterns, SINK_END=fields.SINK_END, BLOCKS=16, **kind.options,
        )  # fmt: skip


def _tied_before(probe: _Probe, columns: _Marks) -> Tensor:
    """Tied keys of all ranks in all key blocks before each one: int64, one per slot of the blocks that the probes reach."""
    t = probe.tables
    counts = t.groups.new_zeros(t.offset_slots + 1)
    compact.tie_count_kernel[(t.chunks.shape[0] * probe.patterns,)](
        columns.tied, t.groups, t.chunks, t.key_blocks, counts, probe.patterns, BLOCKS=16
    )
    return probe.context.axes.ring_sum(counts).cumsum(0)


def _cut_ties(probe: _Probe, marks: _Marks, before: Tensor) -> None:
    """Add to the marked entries the first tied ones of each run, as many as its budget needs."""
    t, chunks = probe.tables, marks.kind.chunks(probe.tables)
    compact.cut_ties_kernel[(chunks.shape[0] * probe.patterns,)](
        marks.words, marks.tied, before, t.groups, chunks, t.key_blocks, marks.state, probe.patterns, BLOCKS=16,
        **marks.kind.options,
    )  # fmt: skip


def _bits_before(words: Tensor) -> Tensor:
    """Bits set in all words before each one, and in all of them: int64, one longer than ``words``."""
    if not words.numel():
        return words.new_zeros(1)
    counts = words.new_empty(words.numel() + 1)
    compact.count_kernel[(-(-words.numel() // 1024),)](words, counts, words.numel(), SIZE=1024)
    return counts.cumsum(0)


def _index(probe: _Probe, words: Tensor, flags: Tensor, refused: Tensor) -> VerticalSlash:
    """Compressed rows from the words of columns and the flags of diagonals; here the host waits for their lengths.

    Everything is launched before: rows are written where there is room for the most of them, and what was chosen is copied, since
    the index lives until the backward pass.
    """
    t, context, patterns = probe.tables, probe.context, probe.patterns
    columns_before, diagonals_before = _bits_before(words), flags.cumsum(0)
    diagonal_values = flags.new_empty(t.diagonal_slots)
    compact.fill_diagonals_kernel[(t.diagonal_tiles.shape[0] * patterns,)](
        flags, diagonals_before, t.segments, t.diagonal_tiles, diagonal_values, patterns, FIELDS=fields.SEGMENT_FIELDS,
        REACH=fields.SEGMENT_REACH, SLOT=fields.SEGMENT_SLOT, TILE=fields.DIAGONAL_TILE,
    )  # fmt: skip
    column_values = _filled(probe, words, columns_before, min(words.numel() * BLOCK, _ROOM))
    diagonal_ptr = diagonals_before.index_select(0, t.diagonal_rows)
    column_ptr = columns_before.index_select(0, t.column_rows)
    summary = flags.new_empty(3)
    compact.summary_kernel[(1,)](columns_before[-1:], diagonals_before[-1:], refused, refused.numel(), summary, SIZE=256)
    summaries = _on_host(torch.stack(context.axes.ring_gather(summary)))
    columns, diagonals, not_finite = summaries[context.axes.ring_rank]
    if not_finite:
        raise SparseRingError(NOT_FINITE)
    if columns > column_values.numel():
        column_values = _filled(probe, words, columns_before, columns)
    else:
        column_values = _cut(column_values, columns)
    if context.axes.ring_size > 1:
        column_ptr, column_values = _over_the_ring(probe, column_ptr, column_values, [row[0] for row in summaries])
    group, diagonal_values = context.config.heads_per_pattern, _cut(diagonal_values, diagonals)
    return VerticalSlash(context.segments, patterns, group, diagonal_ptr, diagonal_values, column_ptr, column_values)


def _cut(values: Tensor, count: int) -> Tensor:
    """The first ``count``, without keeping the memory of the others, if that is worth a launch while the device stands still."""
    kept = values[:count]
    return kept.clone() if values.nbytes > _KEPT else kept


def _on_host(numbers: Tensor) -> list[list[int]]:
    """Read a small tensor: by way of pinned memory, because a copy from a device to other memory is staged and takes longer."""
    if numbers.is_cuda:
        pinned = torch.empty_like(numbers, device="cpu", pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        numbers = pinned
    return numbers.tolist()


def _filled(probe: _Probe, words: Tensor, before: Tensor, room: int) -> Tensor:
    """Tokens of the first ``room`` bits that are set, ascending within each row of the index; what follows them is not set."""
    t = probe.tables
    values = words.new_empty(room)
    if room:
        compact.fill_columns_kernel[(t.chunks.shape[0] * probe.patterns,)](
            words, before, t.groups, t.chunks, t.key_blocks, values, room, probe.patterns, SLOT=fields.SLOT, SIZE=fields.TILES,
            WORDS=16,
        )  # fmt: skip
    return values


def _over_the_ring(probe: _Probe, ptr: Tensor, values: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of the columns of all ranks, from those of this rank; ``counts`` of the ranks. Only what was chosen travels."""
    keys = probe.context.axes.ring_gather_rows(_keys(ptr, values), counts).sort().values  # one rank holds each token
    ptr = torch.searchsorted(keys >> VALUE_BITS, torch.arange(ptr.numel(), device=keys.device))
    return ptr, keys & ((1 << VALUE_BITS) - 1)


def _keys(ptr: Tensor, values: Tensor) -> Tensor:
    """Of each column, its row and its token in one integer, by which columns of several ranks are put in order."""
    return (row_of_entries(ptr, values) << VALUE_BITS) | values
