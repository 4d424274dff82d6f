"""MoBA (arXiv 2502.13189): query blocks read the key blocks whose mean key fits best to them, and always their own.

Key blocks here are *chunks* of ``block_tokens``, counted from the document's first token, and the queries of 64 tokens choose
together, by their mean. Every rank scores its own query blocks: only mean keys (one row per 64 tokens) and the chosen numbers
travel. Equal scores: the earlier chunk. A row's length is known beforehand; the host waits once, to refuse scores that are not
finite.

Shapes: H query heads, K key/value heads, P patterns, B blocks of the sequence, b on this rank, C chunks, D head size, t chunks
chosen beside a query block's own; row = pattern * B + query block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.config import MobaSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import BlockLists, row_of_entries
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.blocks import check_finite, first_blocks, local_blocks, of_all_blocks, row_ptr, valid_rows


@dataclass(frozen=True)
class _Chunks:
    """Chunks of a sequence and the rows that they make.

    Attributes:
        begin: first block of each chunk, int64 ``[C]``; members: its blocks ``[C, blocks per chunk]`` (those of a document's last
            chunk may be of another: no later query reads it).
        own, earlier: each block's own chunk, and how many chunks its document has before, int64 ``[B]``.
        ptr: int64 ``[P * B + 1]``. entries: of all rows.
    """

    begin: Tensor
    members: Tensor
    own: Tensor
    earlier: Tensor
    ptr: Tensor
    entries: int


def select_moba(selector: MobaSelector, q: Tensor, k: Tensor, context: SequenceContext, patterns: int) -> BlockLists:
    """Lists of the chosen chunks' blocks. Collective over the ring; q ``[H, n, D]``, k ``[K, n, D]`` as in `select_index`."""
    chunks = _chunks(selector, context.segments, patterns, q.device)
    _, _, valid = local_blocks(context.layout, context.rank, context.segments, q.device)
    queries = valid_rows(q, valid).sum(2).unflatten(0, (patterns, -1)).mean(1) / valid.clamp(min=1)[:, None]  # [P, b, D]
    keys = of_all_blocks(valid_rows(k, valid).mean(2), context)  # whole but for a document's last block
    check_finite(queries, keys, context=context)
    chosen = of_all_blocks(_best_chunks(queries, keys, chunks, context, selector.top_k - 1), context)  # [P, B, t]
    entry = torch.arange(chunks.entries, device=q.device)
    row = row_of_entries(chunks.ptr, entry)
    place, query = entry - chunks.ptr[row], row % chunks.own.numel()
    size = chunks.members.shape[1]
    kept = chunks.earlier[query].clamp(max=chosen.shape[2])
    number = torch.minimum(place // size, kept)  # the chosen chunks, ascending, and the block's own behind them
    table = torch.nn.functional.pad(chosen.flatten(0, 1), (0, 1))  # one more, so that every number has a place
    chunk = torch.where(number < kept, table[row, number], chunks.own[query])
    values = chunks.begin[chunk] + place - number * size
    return BlockLists(context.segments, patterns, context.heads_per_pattern, chunks.ptr, values)


def _best_chunks(queries: Tensor, keys: Tensor, chunks: _Chunks, context: SequenceContext, count: int) -> Tensor:
    """Of each of this rank's query blocks, the earlier chunks of highest score, ascending: ``[P, b, t]``.

    Where there are fewer, what stands behind them means nothing.
    """
    blocks, _, _ = local_blocks(context.layout, context.rank, context.segments, queries.device)
    own, earlier = chunks.own[blocks][:, None], chunks.earlier[blocks][:, None]
    number = torch.arange(chunks.begin.numel(), device=queries.device)
    readable = (number < own) & (number >= own - earlier)
    means = keys[:, chunks.members].mean(2)  # [K, C, D]
    count = min(count, number.numel())
    best = []
    for pattern, of_pattern in enumerate(queries):  # one at a time: scores are b x C
        scores = of_pattern @ means[pattern * keys.shape[0] // queries.shape[0]].T
        order = scores.masked_fill(~readable, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :count]
        unused = torch.arange(order.shape[1], device=order.device) >= earlier
        best.append(order.masked_fill(unused, number.numel()).sort(1).values.clamp(max=number.numel() - 1))
    return torch.stack(best)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _chunks(selector: MobaSelector, segments: tuple[Segment, ...], patterns: int, device: torch.device) -> _Chunks:
    size, first = selector.block_tokens // BLOCK, first_blocks(segments)
    blocks = torch.arange(first.numel())
    begins = (blocks - first) % size == 0
    begin, own = blocks[begins], begins.cumsum(0) - 1
    earlier = (blocks - first) // size
    ptr = row_ptr(earlier.clamp(max=selector.top_k - 1) * size + blocks - begin[own] + 1, patterns)
    members = (begin[:, None] + torch.arange(size)).clamp(max=first.numel() - 1)
    entries = int(ptr[-1])
    begin, members, own, earlier, ptr = (x.to(device) for x in (begin, members, own, earlier, ptr))
    return _Chunks(begin, members, own, earlier, ptr, entries)
