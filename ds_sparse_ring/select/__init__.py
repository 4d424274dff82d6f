"""Selectors: they make an index from queries and keys, the same one on every rank of a ring, bit for bit."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch
from torch import Tensor

from ds_sparse_ring.config import (
    BigBirdSelector,
    CompleteSelector,
    EveryQuerySelector,
    FixedSelector,
    FullSelector,
    LongformerSelector,
    MobaSelector,
    NormSelector,
    PriceSelector,
    RandomDiagonalsSelector,
    TopPSelector,
    WindowSelector,
    XAttentionSelector,
)
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import FullIndex, Index, VerticalSlash
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.bigbird import select_bigbird
from ds_sparse_ring.select.every_query import fastest_method, select_by_every_query
from ds_sparse_ring.select.maps import AttentionMap, attention_map
from ds_sparse_ring.select.mass import select_by_mass
from ds_sparse_ring.select.moba import select_moba
from ds_sparse_ring.select.norm import select_norm
from ds_sparse_ring.select.price import select_by_price
from ds_sparse_ring.select.recall import estimated_recall, true_recall
from ds_sparse_ring.select.static import random_diagonals, window_index
from ds_sparse_ring.select.xattention import select_xattention

__all__ = ["AttentionMap", "attention_map", "estimated_recall", "select_index", "true_recall"]


@torch.no_grad()
def select_index(
    q: Tensor, k: Tensor, context: SequenceContext, *, scale: float, method: Literal["auto", "triton", "reference"] = "auto"
) -> Index:
    """Choose which keys the queries of a layer read. Collective over the ring.

    Args:
        q: this rank's queries after RoPE, ``[H, n, D]``; k: its keys, ``[K, n, D]``.
        scale: multiplies q.k before the softmax.
        method: "auto" takes the Triton kernels for float16, bfloat16 and float32 on a GPU ("every_query": the CUDA kernel where
            attention is done by that backend), else the readable reference.

    Returns:
        The full index, a `VerticalSlash` over all segments, or `BlockLists` from "bigbird", "moba" and "xattention"; equal on
        all ranks of the ring.

    Raises:
        SparseRingError: the probed scores are not finite; a dtype that the method asked for does not know.
    """
    context = context.with_group(q.shape[0] // k.shape[0])
    group = context.heads_per_pattern
    patterns = q.shape[0] // group
    selector = context.selector
    if isinstance(selector, FullSelector):
        return FullIndex(context.segments, patterns, group)
    fast = method == "triton" or (method == "auto" and _has_triton(q))
    if isinstance(selector, EveryQuerySelector):
        fastest = fastest_method(q, context.kernel, scale) if method == "auto" and fast else "triton"
        return select_by_every_query(selector, q, k, context, scale, fastest if fast else "reference")
    if isinstance(selector, CompleteSelector):
        return _complete_index(selector, q, k, context, scale, patterns)
    if fast:
        from ds_sparse_ring.select.fast import select_fast  # imports Triton

        return select_fast(q, k, context, scale, selector)
    if isinstance(selector, PriceSelector):
        chosen = select_by_price(q, k, context, scale, selector.price)
    elif isinstance(selector, TopPSelector | FixedSelector):
        chosen = select_by_mass(q, k, context, scale, selector)
    else:
        raise SparseRingError(f"selector {selector!r} is not implemented")
    diagonals = torch.cat([chosen.diagonals, _forced_diagonals(context, patterns).to(q.device)])
    columns = torch.cat([chosen.columns, _forced_columns(context, patterns).to(q.device)])
    return VerticalSlash.from_keys(context.segments, patterns, group, diagonals, columns)


def _complete_index(
    selector: CompleteSelector, q: Tensor, k: Tensor, context: SequenceContext, scale: float, patterns: int
) -> Index:
    """What a selector names that adds no local blocks and first tokens; on any device by the same code."""
    if isinstance(selector, WindowSelector | LongformerSelector):
        return window_index(selector, context, patterns, q.device)
    if isinstance(selector, RandomDiagonalsSelector):
        return random_diagonals(selector, context, patterns, q.device)
    if isinstance(selector, BigBirdSelector):
        return select_bigbird(selector, context, patterns, q.device)
    if isinstance(selector, MobaSelector):
        return select_moba(selector, q, k, context, patterns)
    if isinstance(selector, NormSelector):
        return select_norm(selector, k, context, patterns)
    if isinstance(selector, XAttentionSelector):
        return select_xattention(selector, q, k, context, patterns, scale)
    raise SparseRingError(f"selector {selector!r} is not implemented")


def _has_triton(q: Tensor) -> bool:
    """Whether the fast selection runs on this tensor."""
    return (
        q.is_cuda and q.dtype in (torch.float16, torch.bfloat16, torch.float32) and importlib.util.find_spec("triton") is not None
    )


def _forced_diagonals(context: SequenceContext, patterns: int) -> Tensor:
    """(row, offset) pairs: the local blocks of every segment, and all offsets of a segment without a probe."""
    pairs = []
    for s, segment in enumerate(context.segments):
        count = segment.end - segment.document_begin
        dense = context.config.probe == "previous" and segment.opens_document
        if not dense or segment.is_padding:
            count = min(count, context.config.local_blocks) if not segment.is_padding else 1
        pairs.append(_all_patterns(s, patterns, torch.arange(count)))
    return torch.cat(pairs)


def _forced_columns(context: SequenceContext, patterns: int) -> Tensor:
    """(row, token) pairs: the first tokens of every document, for the segments whose local blocks do not hold them."""
    pairs = [torch.empty(0, 2, dtype=torch.int64)]
    for s, segment in enumerate(context.segments):
        if segment.is_padding or (context.config.probe == "previous" and segment.opens_document):
            continue
        first = segment.document_begin * BLOCK
        sinks = torch.arange(first, min(first + context.config.sink_tokens, segment.valid_end))
        pairs.append(_all_patterns(s, patterns, sinks))
    return torch.cat(pairs)


def _all_patterns(segment: int, patterns: int, values: Tensor) -> Tensor:
    rows = segment * patterns + torch.arange(patterns)
    return torch.cartesian_prod(rows, values) if values.numel() else torch.empty(0, 2, dtype=torch.int64)
