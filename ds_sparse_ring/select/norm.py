"""Activation-norm top-k: the keys of largest (or smallest) norm are columns, whoever asks.

A key's norm is all that counts: no query is looked at, and the norm is the same before and after RoPE. Keys of small norm draw
attention according to arXiv 2406.11430; the largest are what sparse activations keep elsewhere. Ranks gather one number per
key and token. Equal norms: the earlier token. A row's length is known beforehand; the host waits once, to refuse norms that are
not finite.

Shapes: K key/value heads, P patterns, N tokens of the sequence; row = segment * P + pattern.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.config import NormSelector, WindowSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.blocks import check_finite, of_all_blocks
from ds_sparse_ring.select.static import window_index


def select_norm(selector: NormSelector, k: Tensor, context: SequenceContext, patterns: int) -> VerticalSlash:
    """The nearest blocks, the first tokens and the columns of most norm. Collective over the ring; k ``[K, n, D]``."""
    group, segments = context.heads_per_pattern, context.segments
    window = WindowSelector(window_blocks=selector.window_blocks, sink_tokens=selector.sink_tokens)
    nearest = window_index(window, context, patterns, k.device)
    norms = torch.linalg.vector_norm(k.to(accumulator_dtype(k.dtype)), dim=2)  # [K, n]
    check_finite(norms, context=context)
    norms = of_all_blocks(norms.unflatten(1, (-1, BLOCK)), context).flatten(1)  # [K, N]
    values, counts = [], []
    for segment in segments:
        sinks, first, end = _ranges(selector, segment)
        chosen = _best(norms[:, first:end], selector) + first
        of_kv_heads = torch.cat([sinks.to(k.device).expand(k.shape[0], -1), chosen], 1)
        values.append(of_kv_heads.repeat_interleave(patterns // k.shape[0], 0).flatten())
        counts.append(of_kv_heads.shape[1])
    ptr = torch.zeros(len(segments) * patterns + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(counts).repeat_interleave(patterns), 0, out=ptr[1:])
    columns = ptr.to(k.device), torch.cat(values)
    return VerticalSlash(segments, patterns, group, nearest.diagonal_ptr, nearest.diagonal_values, *columns)


def _ranges(selector: NormSelector, segment: Segment) -> tuple[Tensor, int, int]:
    """First tokens, and the range of other tokens that a query block of the segment can read as a column."""
    begin = segment.document_begin * BLOCK
    end = max(begin, min(segment.valid_end, (segment.end - selector.window_blocks) * BLOCK))
    first = min(begin + selector.sink_tokens, end)
    return torch.arange(begin, first), first, end


def _best(norms: Tensor, selector: NormSelector) -> Tensor:
    """Places of the keys that are taken, ascending: ``[K, columns]``, or all if there are fewer."""
    order = norms.sort(dim=1, descending=selector.order == "largest", stable=True).indices
    return order[:, : selector.columns].sort(1).values
