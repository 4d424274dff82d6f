"""Attention probabilities of a few query rows against all keys of a ring: what every selector and recall is computed from.

The rows are gathered on all ranks; each rank scores its own keys; maxima and sums of exponentials are reduced over the ring.
Nothing of the size rows x keys leaves a rank.

Shapes: H query heads, K key/value heads, r rows of a group, b key blocks that the rank holds for it, T = BLOCK, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.layout import BLOCK

NOT_FINITE = (
    "selection: queries, keys or their scores are NaN or infinite, so nothing can be chosen from them; "
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
    gathered = gather_rows(q, groups, context)
    largest = gathered.q.new_full(gathered.q.shape[:2], float("-inf"))  # [H, all rows]
    total = gathered.q.new_zeros(gathered.q.shape[:2])
    for group, part in zip(groups, gathered.parts, strict=True):
        scores, _ = row_scores(gathered, part, k, group, context, scale)
        if scores.numel():
            largest[:, part] = scores.amax((-2, -1))
            total[:, part] = (scores - finite(largest[:, part])[..., None, None]).exp().sum((-2, -1))
    largest, share = ring_largest(largest, context)
    lse = largest + context.axes.ring_sum(total.mul_(share)).log()
    for group, part in zip(groups, gathered.parts, strict=True):
        scores, key_blocks = row_scores(gathered, part, k, group, context, scale)
        p = (scores - lse[:, part, None, None]).exp()
        yield RowProbabilities(group.segment, gathered.tokens[part], key_blocks, p)


@dataclass(frozen=True)
class GatheredRows:
    """Query rows of several groups, the same on all ranks.

    Attributes:
        q: ``[H, all rows, D]`` in the accumulator's dtype. tokens: ``[all rows]`` global tokens, on the device.
        parts: where the rows of each group are.
    """

    q: Tensor
    tokens: Tensor
    parts: tuple[slice, ...]


def gather_rows(q: Tensor, groups: Sequence[RowGroup], context: SequenceContext) -> GatheredRows:
    """Query rows by global token, from the ranks that hold them. Collective over the ring."""
    ends = list(accumulate(group.rows.numel() for group in groups))
    parts = tuple(slice(end - group.rows.numel(), end) for group, end in zip(groups, ends, strict=True))
    tokens = torch.cat([group.rows for group in groups]).to(q.device, non_blocking=True)
    local, held = context.layout.locate(tokens, context.rank)
    out = torch.where(held[:, None], q.index_select(1, local), 0).to(accumulator_dtype(q.dtype))
    return GatheredRows(context.axes.ring_sum(out), tokens, parts)


def row_scores(
    gathered: GatheredRows, part: slice, k: Tensor, group: RowGroup, context: SequenceContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Scaled scores ``[H, r, b, T]`` of a group against this rank's key blocks of its document, and those blocks ``[b]``."""
    segment, q_rows, tokens = context.segments[group.segment], gathered.q[:, part], gathered.tokens[part]
    blocks = context.layout.block_ids(context.rank)  # ascending in every layout: the keys are a run of them
    # only blocks from the first row's own on hold keys after any of the rows
    marks = torch.tensor([segment.document_begin, segment.end, int(group.rows[0]) // BLOCK])
    low, high, late = torch.searchsorted(blocks, marks).tolist()
    key_blocks = blocks[low:high].to(k.device, non_blocking=True)
    keys = k[:, low * BLOCK : high * BLOCK].to(q_rows.dtype)  # [K, b * T, D]
    heads, rows, _ = q_rows.shape
    scores = (q_rows.reshape(k.shape[0], -1, q_rows.shape[2]) * scale) @ keys.mT  # [K, H / K * r, b * T]
    scores = scores.view(heads, rows, high - low, BLOCK)
    first_late = max(late - low, 0)
    key_tokens = key_blocks[first_late:, None] * BLOCK + torch.arange(BLOCK, device=k.device)
    scores[:, :, first_late:].masked_fill_(key_tokens > tokens[:, None, None], float("-inf"))
    return scores, key_blocks


def ring_largest(largest: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor]:
    """Largest scores of rows over the ring, and by what sums of exponentials relative to this rank's are multiplied. Collective.

    Raises:
        SparseRingError: a score is NaN or infinite.
    """
    whole = context.axes.ring_max(largest.clone())
    if not torch.isfinite(whole).all():
        raise SparseRingError(NOT_FINITE)
    return whole, (largest - whole).exp()


def finite(x: Tensor) -> Tensor:
    """0 for minus infinity: what the largest of no scores may be subtracted as."""
    return torch.where(torch.isneginf(x), torch.zeros_like(x), x)


def pattern_mean(p: Tensor, heads_per_pattern: int) -> Tensor:
    """Mean over the heads of each pattern: ``[H, ...]`` -> ``[P, ...]``."""
    return p.unflatten(0, (-1, heads_per_pattern)).mean(1)
