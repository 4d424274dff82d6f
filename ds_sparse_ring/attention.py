"""The one autograd function: dynamic vertical-slash attention over a ring.

Forward: choose the index, then walk the plan's hops, merging each hop's result in fp32, while the columns' keys
and values gather.
Backward: the same hops with the same index; the fp32 gradient of each shard of keys and values follows it home.
With keys and values in host memory (`pages`) the same is done page by page: a shard has one page otherwise. Columns that are too
many to be at hand at once are done in parts, between the hops (`column_parts`).

The index is data. It is chosen once per layer and micro-batch and goes, unchanged, to the replay under gradient checkpointing
(through the slot of its call) and to the backward pass. There is no collective outside this function, and in a replay that finds
a kept output only the exchange of heads within a Ulysses group and the columns' gathering, for the backward pass.

Shapes: H query heads, K key/value heads, n local tokens, D head size, C columns of the index over all segments and patterns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_sparse_ring.column_parts import ColumnParts, PartsBackward, PartsForward, parts_of
from ds_sparse_ring.columns import ColumnGather, ColumnReturn
from ds_sparse_ring.comm import TAG_DKV, TAG_DKV_AHEAD, Exchange, Place
from ds_sparse_ring.config import FullSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import BlockLists, FullIndex, Index, VerticalSlash, column_density, density, span_pairs
from ds_sparse_ring.kernels import GPU_BACKENDS, ColumnKV, Work
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.kernels.dense import DenseAttention, DenseCase, document_rows, find_dense
from ds_sparse_ring.pages import KV, DeviceKV, HostKV, kept_pages
from ds_sparse_ring.plan import Hop, Page, RingPlan, Transfer
from ds_sparse_ring.ring_pass import RingPass
from ds_sparse_ring.select import attention_map, estimated_recall, select_index, true_recall
from ds_sparse_ring.select.explore import explore
from ds_sparse_ring.select.static import of_any_text
from ds_sparse_ring.slots import Slot, current_slot
from ds_sparse_ring.spill import Spilled
from ds_sparse_ring.ulysses import to_heads, to_tokens

_DENSE_DOCUMENTS = 16
"""Libraries for dense attention are called once for each document; beyond so many, one launch for all of them is faster."""


@dataclass(frozen=True)
class _Kept:
    """What the first pass of a checkpointed call leaves for its replay; without ``output`` the replay attends again.

    Attributes:
        output: o and lse, maybe outside the device.
        arriving, pages: the columns that the replay gathers for the backward pass, which runs on what the first pass has
            recorded, and the keys and values that it puts into host memory.
    """

    index: Index
    output: list[Tensor] | Spilled | None = None
    arriving: list[ColumnGather] = field(default_factory=list)
    pages: list[HostKV] = field(default_factory=list)


@torch.compiler.disable  # communicates and reads its index on the host: a compiled model calls it as it is
def sparse_ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    layer: int,
    scale: float,
    kv_gradients: list[Tensor] | None = None,
) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence, as sparse as the context's selector makes it.

    Collective over the ring: every rank calls it for the same layers in the same order.

    Args:
        q: ``[1, H, n, D]`` after RoPE; k, v: ``[1, K, n, D]`` with their own number of heads; H must be a multiple of K.
        context: of the sequence, the same for all layers.
        layer: counted from 0; what the schedule has for it chooses, and density and recall are reported under it.
        scale: multiplies q.k before the softmax.
        kv_gradients: for heads that the caller has exchanged and that several ranks share: the backward pass leaves dk and dv
            ``[1, K, n, D]`` here, as they were summed, and gives none to autograd, which would round them to k's dtype before
            the caller sums them over these ranks.

    Returns:
        ``[1, n, H, D]`` in q's dtype.

    Raises:
        SparseRingError: tensors that do not belong to the context's sequence; a selector that met non-finite scores.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):  # as for SDPA: what arrives in mixed precisions is attended to in autocast's
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    context.check(q, k, v)
    context = context.at_layer(layer)
    slot = current_slot()
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    with torch.autocast(device, enabled=False):  # the kernels choose their precision themselves
        o = _SparseRingAttention.apply(q[0], k[0], v[0], context, layer, scale, slot, trains, kv_gradients)
    return o.transpose(0, 1)[None]


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
        trains: bool,
        kv_gradients: list[Tensor] | None,
    ) -> Tensor:
        heads = q.shape[0], k.shape[0]
        if not context.heads_exchanged:
            with context.meter.timed("attention"), context.meter.timed("heads"):
                q, k, v = to_heads((q, k, v), context.axes, Place(layer, backward=False), context.meter)
        context = context.with_group(q.shape[0] // k.shape[0])
        kept = slot.take() if slot is not None else None
        if kept is not None and kept.index.segments != context.segments:
            raise SparseRingError(
                "gradient checkpointing: the replay works on another sequence than the first pass: run backward before the next "
                "sequence is set, or pass each batch's sparse_ring entry to attention as an argument"
            )
        index = kept.index if kept is not None else _select(q, k, context, layer, scale)
        pages = None
        if context.page_blocks is not None and trains and (slot is None or kept is not None):  # or a replay will do it
            assert context.spill is not None
            pages = HostKV(context.spill.spill, context.plan.pages, k.shape[0])
        kv, parts = DeviceKV(k, v, pages), ColumnParts(parts_of(index, k), k, v, context)
        at_once = None if parts.indices else index
        if kept is not None and kept.output is not None:
            o, lse = kept.output.take(last=trains) if isinstance(kept.output, Spilled) else kept.output
            if trains:  # and is no replay for a later layer's input, which no backward pass follows
                # not kept, since on each rank they are as many as the whole sequence has: they arrive until the backward pass
                with context.meter.timed("attention"):
                    kept.arriving[:] = [ColumnGather(k, v, at_once, context).start()]
                    if pages is not None:
                        pages.put_all(kv)
            columns = None
        else:
            with context.meter.timed("attention"):
                gather = ColumnGather(k, v, at_once, context)
                o, lse = ring_forward(q, kv, index, gather, parts, context, layer, scale)
                columns = gather.wait()
        if isinstance(index, VerticalSlash | BlockLists):
            index.forget()
        if slot is not None and kept is None:
            kept = _Kept(index, _keep(o, lse, context, layer))
            slot.put(kept)
            columns = columns if kept.output is None else None  # as in the replay
        ctx.context, ctx.index, ctx.layer, ctx.scale, ctx.heads = context, index, layer, scale, heads
        ctx.parts, ctx.kv_gradients = parts.indices, kv_gradients
        ctx.arriving, ctx.pages = ([], []) if kept is None else (kept.arriving, kept.pages)
        if pages is not None:
            ctx.pages[:] = [pages]
        if context.page_blocks is not None:
            k = v = q.new_empty(0)
        # no columns: empty tensors, so that the number of saved tensors never depends on the data
        column_kv = (columns.k, columns.v) if columns is not None else (q.new_empty(0), q.new_empty(0))
        ctx.save_for_backward(q, k, v, o, lse, *column_kv)
        if context.heads_exchanged:
            return o
        with context.meter.timed("attention"), context.meter.timed("heads"):
            return to_tokens([o], context.axes, heads[:1], Place(layer, backward=False), context.meter)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, column_k, column_v = ctx.saved_tensors
        context, (heads, kv_heads) = ctx.context, ctx.heads
        axes, meter, exchanged, place = context.axes, context.meter, context.heads_exchanged, Place(ctx.layer, backward=True)
        # heads that several ranks have are summed first, here or by the caller
        shared = ctx.kv_gradients is not None if exchanged else kv_heads < axes.ulysses_size
        dkv_dtype = accumulator_dtype(q.dtype) if shared else q.dtype
        with torch.autocast(q.device.type, enabled=False), meter.timed("attention"):
            kv: KV = DeviceKV(k, v)
            if context.page_blocks is not None:
                kv = pages = kept_pages(ctx.pages)
                pages.prefetch()
                if ctx.parts:  # each of them takes rows of all pages
                    k, v = pages.whole()
                    kv = DeviceKV(k, v)
            with meter.timed("heads"):
                do = grads[0] if exchanged else to_heads(grads, axes, place, meter)[0]
            if column_k.numel():
                columns: ColumnKV | None = ColumnKV(column_k, column_v)
            else:
                at_once = None if ctx.parts else ctx.index
                gather = ctx.arriving.pop() if ctx.arriving else ColumnGather(k, v, at_once, context, backward=True)
                columns = gather.wait()
            parts = ColumnParts(ctx.parts, k, v, context, backward=True)
            dq, dk, dv = ring_backward(q, kv, o, lse, do, ctx.index, columns, parts, context, ctx.layer, ctx.scale, dkv_dtype)
            dq = dq.to(q.dtype)
            if not shared:
                dk, dv = dk.to(q.dtype), dv.to(q.dtype)
            if not exchanged:
                with meter.timed("heads"):
                    dq, dk, dv = to_tokens((dq, dk, dv), axes, (heads, kv_heads, kv_heads), place, meter)
                    dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        if isinstance(ctx.index, VerticalSlash | BlockLists):
            ctx.index.forget()
        to_autograd: tuple[Tensor | None, ...] = (dk, dv)
        if ctx.kv_gradients is not None:
            ctx.kv_gradients[:] = dk[None], dv[None]
            to_autograd = (None, None)
        return dq, *to_autograd, None, None, None, None, None, None


def _keep(o: Tensor, lse: Tensor, context: SequenceContext, layer: int) -> list[Tensor] | Spilled | None:
    if context.config.checkpoint != "output":
        return None
    # detached: the output itself belongs to the graph, whose checkpoint owns the slot, and would keep both alive
    tensors = [o.detach(), lse]
    return tensors if context.spill is None else context.spill.keep_output(layer, tensors)


def _select(q: Tensor, k: Tensor, context: SequenceContext, layer: int, scale: float) -> Index:
    with context.meter.timed("index"):
        index = _choose(q, k, context, layer, scale)
    if context.meter.active:
        with context.meter.timed("report"):
            _report(q, k, index, context, layer, scale)
    return index


def _choose(q: Tensor, k: Tensor, context: SequenceContext, layer: int, scale: float) -> Index:
    """What the layer has kept for this step, or what it chooses now; with what it explores."""
    step = context.step
    if step is None or isinstance(context.selector, FullSelector):
        return select_index(q, k, context, scale=scale)
    index = kept = step.kept(layer, context.segments, q.shape[0] // context.heads_per_pattern)
    if index is None:
        index = select_index(q, k, context, scale=scale)
        if step.reuse is not None:
            step.reuse.keep(layer, index if step.keeps_columns else of_any_text(index, context))
    if step.controller is not None:
        step.controller.record(layer, index, chosen=kept is None)
    if step.explore and isinstance(index, VerticalSlash):
        index = explore(index, context, step.explore, step.number)
    return index


def _report(q: Tensor, k: Tensor, index: Index, context: SequenceContext, layer: int, scale: float) -> None:
    """Tell the meter what the index keeps; the density is weighted by the causal area of each segment."""
    spans = context.layout.spans(context.rank)
    by_span = torch.stack([span_pairs(index, span.map, span.blocks) for span in spans])
    local_pairs = by_span.sum(0) * context.heads_per_pattern
    patterns = [index.patterns] * context.axes.ulysses_size
    if context.heads_exchanged:  # another library's shares of the heads may be unequal
        patterns = context.axes.ulysses_counts(index.patterns, q.device)
    for head in context.meter.maps_due(layer, q.shape[0]):
        context.meter.record_map(layer, attention_map(q, k, index, context, head=head, scale=scale))
    if isinstance(index, FullIndex):
        ones = torch.ones(index.patterns, dtype=torch.float64)
        ones = _of_all_heads(ones, patterns, context)
        context.meter.record(layer, ones, ones, torch.zeros_like(ones), float(local_pairs.sum()))
        return
    recall = estimated_recall(q, k, index, context, scale=scale).double()
    parts = [density(index), recall, column_density(index), local_pairs.double()]
    *shares, pairs = torch.stack(parts).cpu()  # the host waits once for all
    of_heads, recall, of_columns = (_of_all_heads(x, patterns, context) for x in shares)
    rows = context.config.true_recall_rows
    measured = true_recall(q, k, index, context, scale=scale, rows=rows) if rows else None
    context.meter.record(layer, of_heads, recall, of_columns, float(pairs.sum()), measured)


def _of_all_heads(mine: Tensor, patterns: list[int], context: SequenceContext) -> Tensor:
    """Values of this rank's patterns ``[P]`` among those of its Ulysses group, so that the mean over ranks is right for all.

    Args:
        patterns: how many each rank of the group has.
    """
    first = sum(patterns[: context.axes.ulysses_rank])
    out = mine.new_zeros(sum(patterns))
    out[first : first + mine.numel()] = context.axes.ulysses_size * mine
    return out


def _dense(q: Tensor, kv_heads: int, index: Index, context: SequenceContext) -> tuple[DenseAttention, list[int]] | None:
    """The library for the full index where one rank of GPUs holds the whole sequence, and the rows of its documents.

    None: the kernel does it. A library takes keys and values as a whole: pages come together again for its backward pass, which
    has no gradients in fp32 that pages would save.
    """
    if not isinstance(index, FullIndex) or context.layout.ranks > 1 or context.kernel.name not in GPU_BACKENDS:
        return None
    rows = document_rows(index.segments)
    if len(rows) > _DENSE_DOCUMENTS:
        return None
    dense = find_dense(
        DenseCase(q.device, q.dtype, q.shape[2], q.shape[0], kv_heads), deterministic=torch.are_deterministic_algorithms_enabled()
    )
    return None if dense is None else (dense, rows)


def ring_forward(
    q: Tensor,
    keys: KV,
    index: Index,
    columns: ColumnGather,
    parts: ColumnParts,
    context: SequenceContext,
    layer: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Walk the ring: attend to the keys and values at hand while the next ones arrive, and to the columns at last.

    Args:
        columns: those that are at hand at once. parts: those that are not.

    Returns:
        o ``[H, n, D]`` in q's dtype, lse_nat ``[H, n]`` in the accumulator's dtype.
    """
    ring = RingPass(context, layer, backward=False)
    if (found := _dense(q, keys.heads, index, context)) is not None:
        dense, documents = found
        k, v = keys.whole()
        with ring.computing():
            return dense.forward(q, k, v, scale=scale, rows=documents)
    acc, plan = accumulator_dtype(q.dtype), context.plan
    o = torch.empty(q.shape, dtype=q.dtype if plan.once and not parts.indices else acc, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=acc, device=q.device)
    merging = PartsForward(parts, q, o, lse, scale, ring, len(plan.hops))
    for hop in ring.hops(plan, keys):
        columns.start()
        merging.start()
        column_kv = columns.wait() if any(pair.last for pair in hop.work) else None
        with ring.computing():
            for pair in hop.work:
                rows, page_rows = pair.q.tokens, pair.k.tokens
                context.kernel.forward(
                    q[:, rows],
                    ring.kv[0][:, page_rows],
                    ring.kv[1][:, page_rows],
                    Work(pair.q.map, pair.k.map, index, scale),
                    o[:, rows],
                    lse[:, rows],
                    column_kv if pair.last else None,
                    overwrite=pair.first,
                )
        merging.go_on()
    return o.to(q.dtype), lse


def ring_backward(
    q: Tensor,
    keys: KV,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    index: Index,
    columns: ColumnKV | None,
    parts: ColumnParts,
    context: SequenceContext,
    layer: int,
    scale: float,
    dkv_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the ring again: gradients of keys and values travel behind them or straight home, summed in ring order.

    Args:
        columns, parts: as in the forward pass.
        dkv_dtype: in which gradients of pages are kept that are whole, if no part follows.

    Returns:
        dq ``[H, n, D]``, dk, dv ``[K, n, D]`` in the input's or the accumulator's dtype.
    """
    ring = RingPass(context, layer, backward=True)
    if (found := _dense(q, keys.heads, index, context)) is not None:
        dense, documents = found
        k, v = keys.whole()
        with ring.computing():
            return dense.backward(do, q, k, v, o, lse, scale=scale, rows=documents)
    acc, plan = accumulator_dtype(q.dtype), context.plan
    delta = context.kernel.delta(do, o)
    dq = torch.empty(q.shape, dtype=q.dtype if plan.once and not parts.indices else acc, device=q.device)
    d_columns = ColumnReturn(columns, acc, keys.heads, index, context)
    homeward, returns = _Homeward(ring), _Returns(ring, plan, d_columns, acc if parts.indices else dkv_dtype)
    adding = PartsBackward(parts, q, do, lse, delta, dq, scale, ring, len(plan.hops))
    for hop in ring.hops(plan, keys):
        adding.start()
        dkv = torch.zeros(ring.kv.shape, dtype=acc, device=ring.kv.device)
        with ring.computing():
            for pair in hop.work:
                rows, page_rows = pair.q.tokens, pair.k.tokens
                context.kernel.backward(
                    q[:, rows],
                    ring.kv[0][:, page_rows],
                    ring.kv[1][:, page_rows],
                    do[:, rows],
                    lse[:, rows],
                    delta[:, rows],
                    Work(pair.q.map, pair.k.map, index, scale),
                    dq[:, rows],
                    dkv[0][:, page_rows],
                    dkv[1][:, page_rows],
                    columns if pair.first else None,
                    d_columns.rows if pair.first else None,
                    overwrite=pair.first,
                )
        if hop is plan.hops[0]:  # a rank's own keys: the first of each of its query spans
            d_columns.send()
        adding.go_on()
        returns.go_on()
        homeward.send(dkv, hop)
        if hop.ends_page:
            returns.expect(homeward)
            homeward = _Homeward(ring)
    dkv = returns.all()
    adding.add_to(dkv)
    return dq, dkv[0], dkv[1]


class _Returns:
    """Pages' gradients on their last way home, each while the hops of the next page run, and what has come home."""

    def __init__(self, ring: RingPass, plan: RingPlan, columns: ColumnReturn, dtype: torch.dtype) -> None:
        self._ring, self._plan, self._columns, self._dtype = ring, plan, columns, dtype
        self._pages = iter(plan.pages)
        self._homeward: _Homeward | None = None
        self._total: Exchange | None = None
        self._dkv: Tensor | None = None

    def expect(self, homeward: _Homeward) -> None:
        """A page has been around the ring."""
        self._finish()
        self._homeward = homeward
        if self._plan.home is None and not homeward.travelling:
            self._finish()

    def go_on(self) -> None:
        """After the kernels of a hop: what has arrived meanwhile goes one step further."""
        if self._homeward is not None:
            self._total, self._homeward = self._homeward.end_round(self._plan.home), None
            if self._plan.home is not None:
                return
        if self._total is not None:
            self._keep(next(self._pages), self._ring.wait(self._total))
            self._total = None

    def all(self) -> Tensor:
        """Gradients of all keys and values of this rank, ``[2, K, n, D]``."""
        self._finish()
        assert self._dkv is not None
        return self._dkv

    def _finish(self) -> None:
        self.go_on()
        self.go_on()

    def _keep(self, page: Page, dkv: Tensor) -> None:
        self._columns.add_to(dkv, page.tokens.start)
        if len(self._plan.pages) == 1:
            self._dkv = dkv
            return
        if self._dkv is None:
            whole = (*dkv.shape[:2], self._plan.pages[-1].tokens.stop, dkv.shape[3])
            self._dkv = torch.empty(whole, dtype=self._dtype, device=dkv.device)
        self._dkv[:, :, page.tokens] = dkv


class _Homeward:
    """Gradients of keys and values on their way to the ranks that these belong to. Sums are in the order of the ring."""

    def __init__(self, ring: RingPass) -> None:
        self._ring = ring
        self._at_home: Tensor | None = None  # of this round, if the first part stays and the others come to it
        self._travelling: Exchange | None = None
        self._total: Exchange | None = None  # of the rounds before

    @property
    def travelling(self) -> bool:
        """Whether something is under way."""
        return self._travelling is not None

    def send(self, dkv: Tensor, hop: Hop) -> None:
        """Take a hop's part: it is added to what has arrived and passed on, or sent home alone."""
        if hop.dkv_ahead is not None:  # a round has ended, and its sums are home by now
            self._total = self.end_round(hop.dkv_ahead)
        if self._travelling is not None:
            (dkv if self._at_home is None else self._at_home).add_(self._ring.wait(self._travelling))
            self._travelling = None  # its buffer serves the next one
        if hop.dkv is None:
            self._at_home = dkv
        else:
            self._travelling = self._ring.exchange(dkv, hop.dkv, TAG_DKV)

    def end_round(self, transfer: Transfer | None) -> Exchange:
        """Add the round's sum to that of the rounds before, and send it to the next node."""
        parts = [] if self._at_home is None else [self._at_home]
        parts += [self._ring.wait(exchange) for exchange in (self._travelling, self._total) if exchange is not None]
        self._at_home = self._travelling = self._total = None
        dkv = parts.pop(0)
        while parts:
            dkv += parts.pop(0)
        return self._ring.exchange(dkv, transfer, TAG_DKV_AHEAD)
