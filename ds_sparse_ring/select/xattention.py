"""XAttention (after arXiv 2503.16428): key blocks by antidiagonal scores, the fewest that reach a share of the mass.

The score of a pair of blocks is the mean of q.k over the pairs (a, b) of tokens on every ``stride``-th antidiagonal,
``(a + b) mod stride = 0``. Sums of keys with equal ``b mod stride`` are all that it takes, so a ring gathers ``stride`` rows for
64 keys and never whole keys. The softmax runs over the scores of blocks; in the paper it runs over groups of ``stride`` tokens
and is summed over a block afterwards, which would take whole keys around the ring. In a query block's own block only pairs that
are not in the future count. Equal masses: the earlier block.

Every rank chooses for its own query blocks, and the chosen pairs are gathered. It takes a byte per pattern, local query block and
block of the sequence. The host waits for how many were chosen.

Shapes: H query heads, K key/value heads, P patterns, B blocks of the sequence, b on this rank, c of these at a time, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.config import XAttentionSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import VALUE_BITS, BlockLists
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.blocks import check_finite, local_blocks, of_all_blocks, valid_rows

_ENTRIES = 1 << 24
"""Scores that are worked on at a time: some 500 MiB with what sorting takes."""

_ONE = 1 << 40
"""Probabilities are summed as integers of this unit: exactly, in any order."""


def select_xattention(
    selector: XAttentionSelector, q: Tensor, k: Tensor, context: SequenceContext, patterns: int, scale: float
) -> BlockLists:
    """Lists of the chosen blocks. Collective over the ring; arguments as in `select_index`."""
    stride, total = selector.stride, context.segments[-1].end
    blocks, first, valid = local_blocks(context.layout, context.rank, context.segments, q.device)
    queries, keys = valid_rows(q, valid), valid_rows(k, valid)
    sums = of_all_blocks(_residue_sums(keys, stride, mirrored=True), context)  # [K, B, stride * D]
    own = _own_scores(queries, keys, valid, stride)
    check_finite(queries.sum((2, 3)), sums, own, context=context)
    kept = torch.empty(patterns, blocks.numel(), total, dtype=torch.bool, device=q.device)
    every = torch.arange(total, device=q.device)
    step = max(1, _ENTRIES // (q.shape[0] * total))
    for at in range(0, blocks.numel(), step):
        part = slice(at, at + step)
        rows = _residue_sums(queries[:, part], stride) / (valid[part].clamp(min=1) * (BLOCK // stride))[:, None]
        scores = (rows.unflatten(0, (k.shape[0], -1)) @ sums[:, None].mT).flatten(0, 1)  # [H, c, B]
        block = blocks[part, None]
        scores = torch.where(every == block, own[:, part, None], scores) * scale
        scores.masked_fill_((every > block) | (every < first[part, None]), float("-inf"))
        mass = scores.softmax(2).unflatten(0, (patterns, -1)).mean(1)
        kept[:, part] = _fewest(mass, selector.threshold) | (every == block)
    return _lists(kept, blocks, context)


def _residue_sums(x: Tensor, stride: int, *, mirrored: bool = False) -> Tensor:
    """Sums of a block's tokens with equal number modulo ``stride``: ``[heads, c, BLOCK, D]`` -> ``[heads, c, stride * D]``.

    Args:
        mirrored: residue r stands where -r would: what r meets on an antidiagonal.
    """
    sums = x.unflatten(2, (-1, stride)).sum(2)
    if mirrored:
        sums = sums[:, :, -torch.arange(stride, device=x.device) % stride]
    return sums.flatten(2)


def _own_scores(queries: Tensor, keys: Tensor, valid: Tensor, stride: int) -> Tensor:
    """Mean of q.k over the antidiagonals of each query block's own block, without pairs in the future: ``[H, b]``."""
    token = torch.arange(BLOCK, device=queries.device)
    on = ((token[:, None] + token) % stride == 0) & (token[:, None] >= token)  # (0, 0) is always there
    pairs = (on & (token[:, None] < valid[:, None, None])).sum((1, 2)).clamp(min=1)
    group = queries.shape[0] // keys.shape[0]
    sums = [
        ((queries[head] @ keys[head // group].mT) * on).sum((1, 2))  # queries that fill up a document are 0
        for head in range(queries.shape[0])
    ]
    return torch.stack(sums) / pairs


def _fewest(mass: Tensor, threshold: float) -> Tensor:
    """The fewest entries of each row ``[..., B]`` that reach the share ``threshold`` of its mass, the largest first."""
    ranked, order = (mass.double() * _ONE).long().sort(dim=-1, descending=True, stable=True)
    reached = ranked.cumsum(-1)
    needed = (reached - ranked).double() < threshold * reached[..., -1:].double()
    return torch.zeros_like(needed).scatter_(-1, order, needed)


def _lists(kept: Tensor, blocks: Tensor, context: SequenceContext) -> BlockLists:
    """Block lists from the rows of all ranks; ``kept`` bool ``[P, b, B]`` of query blocks ``blocks``."""
    patterns, _, total = kept.shape
    pattern, query, key = kept.nonzero(as_tuple=True)
    pairs = ((pattern * total + blocks[query]) << VALUE_BITS) | key
    pairs = context.axes.ring_gather_rows(pairs).sort().values  # each query block has one rank: no pair is there twice
    ptr = torch.searchsorted(pairs, torch.arange(patterns * total + 1, device=pairs.device) << VALUE_BITS)
    values = pairs & ((1 << VALUE_BITS) - 1)
    return BlockLists(context.segments, patterns, context.heads_per_pattern, ptr, values)
