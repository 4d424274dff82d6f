"""Attention probabilities of a few query rows against all keys of a ring: what every selector and recall is computed from.

The rows are gathered on all ranks; each rank scores its own keys; maxima and sums of exponentials are reduced over the ring.
Nothing of the size rows x keys leaves a rank.

Shapes: H query heads, K key/value heads, r rows of a group, b key blocks that the rank holds for it, T = BLOCK, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.layout import BLOCK

NOT_FINITE = (
    "selection: attention scores of the probed queries are NaN or infinite, so nothing can be chosen from them; "
    "the model's activations have overflowed before this layer (lower the learning rate, or train in bf16 or fp32)"
)


@dataclass(frozen=True)
class RowGroup:
    """Query rows (global token ids, ascending) of one segment."""

    segment: int
    rows: Tensor


@dataclass(frozen=True)
class Chosen:
    """What a selector chose: int64 ``[m, 2]`` pairs (segment * P + pattern, block offset or token)."""

    diagonals: Tensor
    columns: Tensor


@dataclass(frozen=True)
class RowProbabilities:
    """Probabilities of a group's rows over the key blocks of this rank.

    Attributes:
        segment: the group's segment. rows: ``[r]`` global tokens. key_blocks: ``[b]`` global blocks, ascending.
        p: ``[H, r, b, T]``; 0 for keys in the future.
    """

    segment: int
    rows: Tensor
    key_blocks: Tensor
    p: Tensor

    @property
    def key_tokens(self) -> Tensor:
        """Global tokens of the keys, ``[b, T]``."""
        return self.key_blocks[:, None] * BLOCK + torch.arange(BLOCK, device=self.key_blocks.device)


def probe_groups(segments: Sequence[Segment], config: SparseRingConfig) -> list[RowGroup]:
    """The last valid queries of every segment (contiguous: rows spread over a segment blur the diagonals)."""
    groups = []
    for s, segment in enumerate(segments):
        if not segment.is_padding:
            first = max(segment.begin * BLOCK, segment.valid_end - config.probe_tokens)
            groups.append(RowGroup(s, torch.arange(first, segment.valid_end)))
    return groups


def target_segment(segments: Sequence[Segment], probed: int, config: SparseRingConfig) -> int | None:
    """The segment whose index the probe of segment ``probed`` chooses; None if there is no such segment."""
    if config.probe == "own":
        return probed
    following = probed + 1
    if following >= len(segments) or segments[following].is_padding or segments[following].opens_document:
        return None
    return following


def row_probabilities(
    q: Tensor, k: Tensor, groups: Sequence[RowGroup], context: SequenceContext, scale: float
) -> Iterator[RowProbabilities]:
    """Probabilities of all groups, one group at a time. Collective over the ring (in the same order on every rank).

    Args:
        q: ``[H, n, D]`` this rank's queries; k: ``[K, n, D]`` its keys.

    Raises:
        SparseRingError: a score is NaN or infinite.
    """
    if not groups:
        return
    rows = torch.cat([group.rows for group in groups]).to(q.device)
    q_rows = _gather_rows(q, rows, context)
    largest = q_rows.new_full(q_rows.shape[:2], float("-inf"))  # [H, all rows]
    total = q_rows.new_zeros(q_rows.shape[:2])
    bounds = [0]
    for group in groups:
        bounds.append(bounds[-1] + group.rows.numel())
    slices = [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
    for group, part in zip(groups, slices, strict=True):
        scores, _ = _scores(q_rows[:, part], k, group, context, scale)
        if scores.numel():
            largest[:, part] = scores.amax((-2, -1))
            total[:, part] = (scores - _finite(largest[:, part])[..., None, None]).exp().sum((-2, -1))
    local_largest = largest.clone()
    largest = context.axes.ring_max(largest)
    if not torch.isfinite(largest).all():
        raise SparseRingError(NOT_FINITE)
    total *= (local_largest - largest).exp()
    lse = largest + context.axes.ring_sum(total).log()
    for group, part in zip(groups, slices, strict=True):
        scores, key_blocks = _scores(q_rows[:, part], k, group, context, scale)
        p = (scores - lse[:, part, None, None]).exp()
        yield RowProbabilities(group.segment, group.rows.to(q.device), key_blocks, p)


def _gather_rows(q: Tensor, rows: Tensor, context: SequenceContext) -> Tensor:
    """Query rows by global token, the same on all ranks: ``[H, rows, D]`` in the accumulator's dtype."""
    local, held = context.layout.locate(rows, context.rank)
    out = q.new_zeros(q.shape[0], rows.numel(), q.shape[2], dtype=accumulator_dtype(q.dtype))
    out[:, held] = q[:, local[held]].to(out.dtype)
    return context.axes.ring_sum(out)


def _scores(q_rows: Tensor, k: Tensor, group: RowGroup, context: SequenceContext, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled scores ``[H, r, b, T]`` of a group against this rank's key blocks of its document, and those blocks ``[b]``."""
    segment = context.segments[group.segment]
    blocks = context.layout.block_ids(context.rank).to(k.device)
    local = ((blocks >= segment.document_begin) & (blocks < segment.end)).nonzero().flatten()
    local = local[blocks[local].argsort()]
    keys = k.unflatten(1, (-1, BLOCK))[:, local].flatten(1, 2).to(q_rows.dtype)  # [K, b * T, D]
    heads, rows, _ = q_rows.shape
    scores = (q_rows.reshape(k.shape[0], -1, q_rows.shape[2]) * scale) @ keys.mT  # [K, H / K * r, b * T]
    scores = scores.view(heads, rows, local.numel(), BLOCK)
    key_blocks, query_rows = blocks[local], group.rows.to(k.device)
    late = key_blocks >= query_rows[0] // BLOCK  # only these hold keys after any of the rows
    key_tokens = key_blocks[late, None] * BLOCK + torch.arange(BLOCK, device=k.device)
    future = key_tokens[None] > query_rows[:, None, None]
    scores[:, :, late] = scores[:, :, late].masked_fill(future, float("-inf"))
    return scores, key_blocks


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isneginf(x), torch.zeros_like(x), x)


def pattern_mean(p: Tensor, heads_per_pattern: int) -> Tensor:
    """Mean over the heads of each pattern: ``[H, ...]`` -> ``[P, ...]``."""
    return p.unflatten(0, (-1, heads_per_pattern)).mean(1)
