"""The one autograd function: dynamic vertical-slash attention over a ring.

Forward: choose the index, gather the columns' keys and values, then walk the plan's hops, merging each hop's result in fp32.
Backward: the same hops with the same index; the fp32 gradient of each shard of keys and values follows it home.

The index is data. It is chosen once per layer and micro-batch and goes, unchanged, to the replay under gradient checkpointing
(through the slot of its call) and to the backward pass. There is no collective outside this function, and in a replay that finds
a kept output only the exchange of heads within a Ulysses group.

Shapes: H query heads, K key/value heads, n local tokens, D head size, C columns of the index over all segments and patterns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_sparse_ring.comm import TAG_DKV, TAG_DKV_AHEAD, TAG_KV, TAG_KV_AHEAD, Exchange
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import BlockLists, FullIndex, Index, VerticalSlash, density, span_pairs
from ds_sparse_ring.kernels import ColumnKV, Work
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.kernels.dense import DenseAttention, DenseCase, document_rows, find_dense
from ds_sparse_ring.plan import Transfer, ring_plan
from ds_sparse_ring.select import estimated_recall, select_index, true_recall
from ds_sparse_ring.slots import Slot, current_slot
from ds_sparse_ring.ulysses import to_heads, to_tokens

_DENSE_DOCUMENTS = 16
"""Libraries for dense attention are called once for each document; beyond so many, one launch for all of them is faster."""


@dataclass(frozen=True)
class _Kept:
    """What the first pass of a checkpointed call leaves for its replay; without ``o`` the replay attends again."""

    index: Index
    o: Tensor | None = None
    lse: Tensor | None = None
    columns: ColumnKV | None = None


@torch.compiler.disable  # communicates and reads its index on the host: a compiled model calls it as it is
def sparse_ring_attention(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, *, layer: int, scale: float) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence, as sparse as the context's selector makes it.

    Collective over the ring: every rank calls it for the same layers in the same order.

    Args:
        q: ``[1, H, n, D]`` after RoPE; k, v: ``[1, K, n, D]`` with their own number of heads; H must be a multiple of K.
        layer: number under which density and recall are reported.
        scale: multiplies q.k before the softmax.

    Returns:
        ``[1, n, H, D]`` in q's dtype.

    Raises:
        SparseRingError: tensors that do not belong to the context's sequence; a selector that met non-finite scores.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):  # as for SDPA: what arrives in mixed precisions is attended to in autocast's
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    context.check(q, k, v)
    slot = current_slot()
    with torch.autocast(device, enabled=False):  # the kernels choose their precision themselves
        return _SparseRingAttention.apply(q[0], k[0], v[0], context, layer, scale, slot).transpose(0, 1)[None]


class _SparseRingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: SequenceContext,
        layer: int,
        scale: float,
        slot: Slot[_Kept] | None,
    ) -> Tensor:
        heads = q.shape[0], k.shape[0]
        if not context.heads_exchanged:
            q, k, v = (to_heads(x, context.axes) for x in (q, k, v))
        kept = slot.take() if slot is not None else None
        if kept is not None and kept.index.segments != context.segments:
            raise SparseRingError(
                "gradient checkpointing: the replay works on another sequence than the first pass: run backward before the next "
                "sequence is set, or pass each batch's sparse_ring entry to attention as an argument"
            )
        index = kept.index if kept is not None else _select(q, k, context, layer, scale)
        if kept is not None and kept.o is not None and kept.lse is not None:
            o, lse, columns = kept.o, kept.lse, kept.columns
        else:
            with context.meter.timed("attention"):
                columns = gather_columns(k, v, index, context)
                o, lse = ring_forward(q, k, v, index, columns, context, scale)
        if isinstance(index, VerticalSlash | BlockLists):
            index.forget()
        if slot is not None and kept is None:
            everything = context.config.checkpoint == "output"
            # detached: the output itself belongs to the graph, whose checkpoint owns the slot, and would keep both alive
            slot.put(_Kept(index, o.detach(), lse, columns) if everything else _Kept(index))
        ctx.context, ctx.index, ctx.scale, ctx.heads = context, index, scale, heads
        # no columns: empty tensors, so that the number of saved tensors never depends on the data
        column_kv = (columns.k, columns.v) if columns is not None else (q.new_empty(0), q.new_empty(0))
        ctx.save_for_backward(q, k, v, o, lse, *column_kv)
        return o if context.heads_exchanged else to_tokens(o, context.axes, heads[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, column_k, column_v = ctx.saved_tensors
        columns = ColumnKV(column_k, column_v) if column_k.numel() else None
        with torch.autocast(q.device.type, enabled=False), ctx.context.meter.timed("attention"):
            exchanged, axes, (heads, kv_heads) = ctx.context.heads_exchanged, ctx.context.axes, ctx.heads
            do = grads[0] if exchanged else to_heads(grads[0], axes)
            dq, dk, dv = ring_backward(q, k, v, o, lse, do, ctx.index, columns, ctx.context, ctx.scale)
            if not exchanged:
                dq, dk, dv = to_tokens(dq, axes, heads), to_tokens(dk, axes, kv_heads), to_tokens(dv, axes, kv_heads)
            dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
        return dq, dk, dv, None, None, None, None


def _select(q: Tensor, k: Tensor, context: SequenceContext, layer: int, scale: float) -> Index:
    with context.meter.timed("index"):
        index = select_index(q, k, context, scale=scale)
    if context.meter.active:
        with context.meter.timed("report"):
            _report(q, k, index, context, layer, scale)
    return index


def _report(q: Tensor, k: Tensor, index: Index, context: SequenceContext, layer: int, scale: float) -> None:
    """Tell the meter what the index keeps; the density is weighted by the causal area of each segment."""
    spans = context.layout.spans(context.rank)
    by_span = torch.stack([span_pairs(index, span.map, span.blocks) for span in spans])
    local_pairs = by_span.sum(0) * context.config.heads_per_pattern
    patterns = [index.patterns] * context.axes.ulysses_size
    if context.heads_exchanged:  # another library's shares of the heads may be unequal
        patterns = context.axes.ulysses_counts(index.patterns, q.device)
    if isinstance(index, FullIndex):
        ones = torch.ones(index.patterns, dtype=torch.float64)
        ones = _of_all_heads(ones, patterns, context)
        context.meter.record(layer, ones, ones, float(local_pairs.sum()))
        return
    recall = estimated_recall(q, k, index, context, scale=scale).double()
    shares, recall, pairs = torch.stack([density(index), recall, local_pairs.double()]).cpu()  # the host waits once for all
    shares, recall = (_of_all_heads(x, patterns, context) for x in (shares, recall))
    rows = context.config.true_recall_rows
    measured = true_recall(q, k, index, context, scale=scale, rows=rows) if rows else None
    context.meter.record(layer, shares, recall, float(pairs.sum()), measured)


def _of_all_heads(mine: Tensor, patterns: list[int], context: SequenceContext) -> Tensor:
    """Values of this rank's patterns ``[P]`` among those of its Ulysses group, so that the mean over ranks is right for all.

    Args:
        patterns: how many each rank of the group has.
    """
    first = sum(patterns[: context.axes.ulysses_rank])
    out = mine.new_zeros(sum(patterns))
    out[first : first + mine.numel()] = context.axes.ulysses_size * mine
    return out


def gather_columns(k: Tensor, v: Tensor, index: Index, context: SequenceContext) -> ColumnKV | None:
    """Keys and values of the index's columns on every rank, ``[C, D]`` each; None if there are none. Collective.

    Every row has one owner and zeros elsewhere, so the sum over the ring is exact.
    """
    if not isinstance(index, VerticalSlash) or index.column_values.numel() == 0:
        return None
    row, held, kv_head = _column_places(k, index, context)
    gathered = torch.stack([k[kv_head, row], v[kv_head, row]]).masked_fill_(~held[:, None], 0)
    gathered = context.axes.ring_sum(gathered)
    return ColumnKV(gathered[0], gathered[1])


def _column_places(k: Tensor, index: VerticalSlash, context: SequenceContext) -> tuple[Tensor, Tensor, Tensor]:
    """Local row of each column, whether this rank holds it, and its key/value head; ``[C]`` each."""
    row, held = context.layout.locate(index.column_values, context.rank)
    return row, held, index.column_kv_heads(k.shape[0])


def _dense(q: Tensor, k: Tensor, index: Index, context: SequenceContext) -> tuple[DenseAttention, list[int]] | None:
    """The library for the full index where one rank of GPUs holds the whole sequence, and the rows of its documents.

    None: the kernel does it.
    """
    if not isinstance(index, FullIndex) or context.layout.ranks > 1 or context.kernel.name != "triton":
        return None
    rows = document_rows(index.segments)
    if len(rows) > _DENSE_DOCUMENTS:
        return None
    dense = find_dense(DenseCase.of(q, k), deterministic=torch.are_deterministic_algorithms_enabled())
    return None if dense is None else (dense, rows)


def ring_forward(
    q: Tensor, k: Tensor, v: Tensor, index: Index, columns: ColumnKV | None, context: SequenceContext, scale: float
) -> tuple[Tensor, Tensor]:
    """Walk the ring: attend to the keys and values at hand while the next ones arrive.

    Returns:
        o ``[H, n, D]`` in q's dtype, lse_nat ``[H, n]`` in the accumulator's dtype.
    """
    if (found := _dense(q, k, index, context)) is not None:
        dense, documents = found
        return dense.forward(q, k, v, scale=scale, rows=documents)
    acc, plan = accumulator_dtype(q.dtype), ring_plan(context.layout, context.rank, context.axes.inner_size)
    o = torch.empty(q.shape, dtype=q.dtype if plan.once else acc, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=acc, device=q.device)
    kv = torch.stack([k, v])
    following = context.axes.exchange(kv, None, TAG_KV_AHEAD)
    for hop in plan.hops:
        if hop.kv_ahead is not None:
            following = context.axes.exchange(kv, hop.kv_ahead, TAG_KV_AHEAD)
        arriving = context.axes.exchange(kv, hop.kv, TAG_KV) if hop.kv is not None else following
        for q_span, k_span in hop.work:
            rows, keys = q_span.tokens, k_span.tokens
            own = hop.source == context.rank and q_span == k_span
            context.kernel.forward(
                q[:, rows],
                kv[0][:, keys],
                kv[1][:, keys],
                Work(q_span.map, k_span.map, index, scale),
                o[:, rows],
                lse[:, rows],
                # the columns are one local task per query span: done with its own keys
                columns if own else None,
                overwrite=own,
            )
        kv = arriving.wait()
    return o.to(q.dtype), lse


def ring_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    index: Index,
    columns: ColumnKV | None,
    context: SequenceContext,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the ring again: gradients of keys and values travel behind them, summed in ring order, and end at home.

    Returns:
        dq ``[H, n, D]``, dk, dv ``[K, n, D]`` in the input's or the accumulator's dtype.
    """
    if (found := _dense(q, k, index, context)) is not None:
        dense, documents = found
        return dense.backward(do, q, k, v, o, lse, scale=scale, rows=documents)
    acc, plan = accumulator_dtype(q.dtype), ring_plan(context.layout, context.rank, context.axes.inner_size)
    delta = context.kernel.delta(do, o)
    dq = torch.empty(q.shape, dtype=q.dtype if plan.once else acc, device=q.device)
    d_columns = ColumnKV(torch.zeros_like(columns.k, dtype=acc), torch.zeros_like(columns.v, dtype=acc)) if columns else None
    kv = torch.stack([k, v])
    following = context.axes.exchange(kv, None, TAG_KV_AHEAD)
    travelling = total = None
    for hop in plan.hops:
        if hop.kv_ahead is not None:
            following = context.axes.exchange(kv, hop.kv_ahead, TAG_KV_AHEAD)
        arriving = context.axes.exchange(kv, hop.kv, TAG_KV) if hop.kv is not None else following
        dkv = torch.zeros(kv.shape, dtype=acc, device=kv.device)
        for q_span, k_span in hop.work:
            rows, keys = q_span.tokens, k_span.tokens
            own = hop.source == context.rank and q_span == k_span
            context.kernel.backward(
                q[:, rows],
                kv[0][:, keys],
                kv[1][:, keys],
                do[:, rows],
                lse[:, rows],
                delta[:, rows],
                Work(q_span.map, k_span.map, index, scale),
                dq[:, rows],
                dkv[0][:, keys],
                dkv[1][:, keys],
                columns if own else None,
                d_columns if own else None,
                overwrite=own,
            )
        if hop.dkv_ahead is not None and travelling is not None:  # the round before has ended: its sums are home by now
            total, travelling = _pass_on(travelling, total, hop.dkv_ahead, context), None
        if travelling is not None:
            dkv += travelling.wait()
        travelling = context.axes.exchange(dkv, hop.dkv, TAG_DKV)
        kv = arriving.wait()
    assert travelling is not None
    dkv = _pass_on(travelling, total, plan.home, context).wait()
    if isinstance(index, VerticalSlash) and d_columns is not None:
        _return_columns(dkv, d_columns, k, index, context)
    return dq, dkv[0], dkv[1]


def _pass_on(returning: Exchange, total: Exchange | None, transfer: Transfer | None, context: SequenceContext) -> Exchange:
    """Add a round's gradient to those of the nodes before, and send the sum to the next node."""
    dkv = returning.wait()
    if total is not None:
        dkv += total.wait()
    return context.axes.exchange(dkv, transfer, TAG_DKV_AHEAD)


def _return_columns(dkv: Tensor, d_columns: ColumnKV, k: Tensor, index: VerticalSlash, context: SequenceContext) -> None:
    """Sum the columns' gradients over the ring once and add them where their keys and values live."""
    total = context.axes.ring_sum(torch.stack([d_columns.k, d_columns.v]))
    row, held, kv_head = _column_places(k, index, context)
    place = torch.where(held, kv_head * dkv.shape[2] + row, -1)
    context.kernel.add_rows(dkv.flatten(1, 2), place, total)  # columns of different patterns and segments may be one token
