"""Selection by mass on a GPU, `top_p` and `fixed`: thresholds by counting digits, ties by position. See `fast`.

Shapes as in `triton_probe`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.config import FixedSelector, TopPSelector
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import tables as fields
from ds_sparse_ring.select import triton_compact as compact
from ds_sparse_ring.select import triton_mass
from ds_sparse_ring.select.fast_probe import Probe, mass_options
from ds_sparse_ring.select.mass import Budget, budgets
from ds_sparse_ring.select.tables import Tables
from ds_sparse_ring.select.triton_diagonals import diagonal_flag_kernel

_NO_BOUND = 1 << 62
_ENTRIES = 1 << 25  # tokens that selection by mass ranks at a time: 24 bytes each (masses, parts of diagonals), 768 MiB


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


def by_mass(probe: Probe, selector: TopPSelector | FixedSelector) -> tuple[Tensor, Tensor]:
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
    _cut_ties(probe, offsets, compact.bits_before(offsets.tied))
    flags = columns.words.new_empty(t.diagonal_slots + 1)
    diagonal_flag_kernel[(t.diagonal_tiles.shape[0] * patterns,)](
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


def _masses(probe: Probe, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Mean probability of this rank's keys and mass of token diagonals over all ranks' for the groups [first, last).

    fp32, 64 per slot each. What a key block adds to its diagonals is written once, 1 KiB per slot, and read once.
    """
    t, patterns, shared = probe.tables, probe.patterns, probe.context.axes.ring_size > 1
    keys, offsets = _part(t, first, last, _COLUMNS), _part(t, first, last, _OFFSETS)
    columns = probe.lse.new_empty(keys.slots * patterns * BLOCK)
    diagonals = t.groups.new_empty(keys.slots * patterns * 2 * BLOCK)
    if keys.chunks:
        options = probe.options | mass_options(probe.k.shape[2], probe.k.element_size())
        triton_mass.mass_kernel[(keys.chunks * patterns,)](
            probe.q_rows, probe.k, probe.lse, t.groups, t.chunks, t.key_blocks, columns, diagonals, *probe.strides, probe.scale2,
            keys.chunk_first, keys.slot_first * patterns, probe.groups, patterns, **options,
        )  # fmt: skip
    mass = (diagonals if shared else columns).new_empty(offsets.slots * patterns * BLOCK)
    triton_mass.offset_mass_kernel[(offsets.chunks * patterns,)](
        diagonals, t.groups, t.offset_chunks, t.local_of, mass, offsets.chunk_first, keys.slot_first * patterns,
        offsets.slot_first * patterns, patterns, SHARED=shared, BLOCKS=8,
    )  # fmt: skip
    if shared:  # integers: the same sum, in whatever order NCCL adds the ranks
        mass = probe.context.axes.ring_sum(mass).to(torch.float32).mul_(triton_mass.MEAN)
    return columns, mass


def _mark(probe: Probe, marks: _Marks, mass: Tensor, first: int, last: int, *, shared: bool) -> None:
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


def _tied_before(probe: Probe, columns: _Marks) -> Tensor:
    """Tied keys of all ranks in all key blocks before each one: int64, one per slot of the blocks that the probes reach."""
    t = probe.tables
    counts = t.groups.new_zeros(t.offset_slots + 1)
    compact.tie_count_kernel[(t.chunks.shape[0] * probe.patterns,)](
        columns.tied, t.groups, t.chunks, t.key_blocks, counts, probe.patterns, BLOCKS=16
    )
    return probe.context.axes.ring_sum(counts).cumsum(0)


def _cut_ties(probe: Probe, marks: _Marks, before: Tensor) -> None:
    """Add to the marked entries the first tied ones of each run, as many as its budget needs."""
    t, chunks = probe.tables, marks.kind.chunks(probe.tables)
    compact.cut_ties_kernel[(chunks.shape[0] * probe.patterns,)](
        marks.words, marks.tied, before, t.groups, chunks, t.key_blocks, marks.state, probe.patterns, BLOCKS=16,
        **marks.kind.options,
    )  # fmt: skip
