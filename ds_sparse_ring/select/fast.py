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

import torch
from torch import Tensor

from ds_sparse_ring.config import FixedSelector, PriceSelector, TopPSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VALUE_BITS, VerticalSlash, row_of_entries
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import tables as fields
from ds_sparse_ring.select import triton_compact as compact
from ds_sparse_ring.select import triton_diagonals
from ds_sparse_ring.select.fast_mass import by_mass
from ds_sparse_ring.select.fast_probe import Bounds, Probe, make_probe
from ds_sparse_ring.select.probe import NOT_FINITE
from ds_sparse_ring.select.triton_price import price_kernel
from ds_sparse_ring.streams import HostCopy

_ROOM = 1 << 23  # columns that are written before their number is known: 64 MiB
_KEPT = 1 << 20  # bytes that an index may keep beside its values
_BOUNDED_BLOCKS = 1024  # sequences of so many blocks are worth finding out which of them need a second look
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
        probe, refused = make_probe(q, k, context, scale, bounded)
        if isinstance(selector, PriceSelector):
            words, flags = _by_price(probe, selector.price)
        else:
            words, flags = by_mass(probe, selector)
        return _index(probe, words, flags, refused)


def _by_price(probe: Probe, price: float) -> tuple[Tensor, Tensor]:
    """Words of columns (sinks included) and flags of diagonals, behind a zero."""
    t, patterns = probe.tables, probe.patterns
    words = t.groups.new_empty(t.column_slots)
    partials = probe.lse.new_empty(t.column_slots, 4)
    needed = _needed(probe, probe.bounds, price) if probe.bounds is not None else words
    # three programs to a multiprocessor, found to fit without spilling
    small = probe.together == 1 and probe.k.shape[2] * probe.k.element_size() <= 256
    registers = {"maxnreg": 168} if small and torch.version.hip is None else {}
    price_kernel[(t.chunks.shape[0] * patterns,)](
        probe.q_rows, probe.k, probe.lse, t.groups, t.chunks, t.key_blocks, words, partials, needed, t.segments, *probe.strides,
        probe.scale2, price, probe.context.config.local_blocks, probe.groups, patterns, HEADS=probe.together,
        SKIP=probe.bounds is not None, **probe.options, **registers,
    )  # fmt: skip
    mass = probe.lse.new_empty(t.diagonal_slots)
    grid = (t.diagonal_tiles.shape[0] * patterns,)
    triton_diagonals.diagonal_mass_kernel[grid](partials, t.groups, t.segments, t.diagonal_tiles, t.local_of, mass, patterns)
    mass = probe.context.axes.ring_sum(mass)
    flags = words.new_empty(t.diagonal_slots + 1)
    triton_diagonals.diagonal_flag_kernel[grid](
        mass, t.groups, t.segments, t.diagonal_tiles, flags, BLOCK * price, patterns, WORDS=False
    )  # fmt: skip
    return words, flags


def _needed(probe: Probe, bounds: Bounds, price: float) -> Tensor:
    """Which key blocks can hold a column or give rise to a diagonal: int8, one per slot of a diagonal."""
    t, patterns = probe.tables, probe.patterns
    grid = (t.diagonal_tiles.shape[0] * patterns,)
    most = probe.lse.new_empty(t.diagonal_slots)
    triton_diagonals.bound_kernel[grid](
        bounds.sums, bounds.anchors, probe.lse, t.groups, t.segments, t.diagonal_tiles, t.local_of, most, probe.groups, patterns,
        HPP=probe.context.heads_per_pattern,
    )  # fmt: skip
    most = probe.context.axes.ring_sum(most)
    needed = most.new_empty(t.diagonal_slots, dtype=torch.int8)
    triton_diagonals.needed_kernel[grid](most, t.segments, t.diagonal_tiles, needed, price, patterns)
    return needed


def _index(probe: Probe, words: Tensor, flags: Tensor, refused: Tensor) -> VerticalSlash:
    """Compressed rows from the words of columns and the flags of diagonals; here the host waits for their lengths.

    Everything is launched before: rows are written where there is room for the most of them, and what was chosen is copied, since
    the index lives until the backward pass.
    """
    t, context, patterns = probe.tables, probe.context, probe.patterns
    columns_before, diagonals_before = compact.bits_before(words), flags.cumsum(0)
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
    summaries = HostCopy(torch.stack(context.axes.ring_gather(summary))).get().tolist()
    columns, diagonals, not_finite = summaries[context.axes.ring_rank]
    if not_finite:
        raise SparseRingError(NOT_FINITE)
    if columns > column_values.numel():
        column_values = _filled(probe, words, columns_before, columns)
    else:
        column_values = _cut(column_values, columns)
    if context.axes.ring_size > 1:
        column_ptr, column_values = _over_the_ring(probe, column_ptr, column_values, [row[0] for row in summaries])
    group, diagonal_values = context.heads_per_pattern, _cut(diagonal_values, diagonals)
    return VerticalSlash(context.segments, patterns, group, diagonal_ptr, diagonal_values, column_ptr, column_values)


def _cut(values: Tensor, count: int) -> Tensor:
    """The first ``count``, without keeping the memory of the others, if that is worth a launch while the device stands still."""
    kept = values[:count]
    return kept.clone() if values.nbytes > _KEPT else kept


def _filled(probe: Probe, words: Tensor, before: Tensor, room: int) -> Tensor:
    """Tokens of the first ``room`` bits that are set, ascending within each row of the index; what follows them is not set."""
    t = probe.tables
    values = words.new_empty(room)
    if room:
        compact.fill_columns_kernel[(t.chunks.shape[0] * probe.patterns,)](
            words, before, t.groups, t.chunks, t.key_blocks, values, room, probe.patterns, SLOT=fields.SLOT, SIZE=fields.TILES,
            WORDS=16,
        )  # fmt: skip
    return values


def _over_the_ring(probe: Probe, ptr: Tensor, values: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of the columns of all ranks, from those of this rank; ``counts`` of the ranks. Only what was chosen travels."""
    keys = probe.context.axes.ring_gather_rows(_keys(ptr, values), counts).sort().values  # one rank holds each token
    ptr = torch.searchsorted(keys >> VALUE_BITS, torch.arange(ptr.numel(), device=keys.device))
    return ptr, keys & ((1 << VALUE_BITS) - 1)


def _keys(ptr: Tensor, values: Tensor) -> Tensor:
    """Of each column, its row and its token in one integer, by which columns of several ranks are put in order."""
    return (row_of_entries(ptr, values) << VALUE_BITS) | values
