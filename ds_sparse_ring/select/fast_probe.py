"""The probes of all segments on a GPU: their rows, gathered on every rank, and the log-sum-exp of these over all keys.

Shapes as in `triton_probe`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import tables as fields
from ds_sparse_ring.select import triton_probe
from ds_sparse_ring.select.tables import Tables, tables_of

_WARPS = 4


@dataclass(frozen=True)
class Bounds:
    """Bounds of the mass of key blocks: most have too little to hold anything that selection by price keeps.

    Attributes:
        anchors: fp32 ``[H, G * R]``, log-sum-exp over a few key blocks: a lower bound of that over all.
        sums: fp32, one per head and key block of each group: its exponentials relative to the anchors, summed over the rows.
    """

    anchors: Tensor
    sums: Tensor


@dataclass(frozen=True)
class Probe:
    """The probes of all segments: their rows, gathered on every rank, their log-sum-exp (base 2), and how to launch on them."""

    q_rows: Tensor
    k: Tensor
    lse: Tensor
    tables: Tables
    context: SequenceContext
    patterns: int
    scale2: float
    bounds: Bounds | None

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
        heads = self.context.heads_per_pattern
        return {"HPP": heads, **_options(self.q_rows, self.k, heads)}

    @property
    def together(self) -> int:
        """Heads of a pattern that are scored together."""
        return together(self.q_rows.shape[2], self.q_rows.element_size(), self.context.heads_per_pattern)


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


def make_probe(q: Tensor, k: Tensor, context: SequenceContext, scale: float, bounded: bool) -> tuple[Probe, Tensor]:
    """Rows and log-sum-exp of all probes; and flags on the device: some score is not finite."""
    patterns = q.shape[0] // context.heads_per_pattern
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
        bounds = Bounds(anchors, anchors.new_empty(tables.column_slots // patterns * q.shape[0]))
    largest, total = _log_sum_exp(q_rows, k, tables, tables.chunks, scale2, bounds)
    if context.axes.ring_size > 1:
        local = largest.clone()
        largest = context.axes.ring_max(largest)
        total *= (local - largest).exp2()
        total = context.axes.ring_sum(total)
    lse, refused = _row_sums(largest, total, tables)
    return Probe(q_rows, k, lse, tables, context, patterns, scale2, bounds), refused


def _row_sums(largest: Tensor, total: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Log-sum-exp, +inf for rows that are not valid, and which groups' are not finite: int64 ``[H, G]``."""
    heads, groups = largest.shape[0], tables.groups.shape[0]
    lse, refused = torch.empty_like(largest), tables.groups.new_empty(heads, groups)
    triton_probe.lse_kernel[(groups, heads)](largest, total, tables.valid, lse, refused, groups)
    return lse, refused


def _log_sum_exp(
    q_rows: Tensor, k: Tensor, tables: Tables, chunks: Tensor, scale2: float, bounds: Bounds | None
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
    triton_probe.lse_chunk_kernel[(count * (heads // at_once),)](
        q_rows, k, tables.groups, chunks, tables.key_blocks, parts[0], parts[1], anchors, sums, k.stride(0), k.stride(1), scale2,
        groups, heads, HEADS=at_once, BOUND=bounds is not None, **options,
    )  # fmt: skip
    out = q_rows.new_empty(2, heads, groups * BLOCK, dtype=torch.float32)
    whole = chunks is tables.chunks
    triton_probe.lse_merge_kernel[(groups, heads)](
        parts[0], parts[1], tables.groups, out[0], out[1], groups, heads,
        BEGIN=fields.CHUNK_BEGIN if whole else fields.ANCHOR_BEGIN, END=fields.CHUNK_END if whole else fields.ANCHOR_END,
        CHUNKS=64,
    )  # fmt: skip
    return out[0], out[1]
