"""Whether a ring's plans are right, and what they take: they are compared with the layout and run as data (`plan_run`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BlockMap, Layout, Span
from ds_sparse_ring.plan import InnerKind, Level, Page, RingPlan, ring_plan
from ds_sparse_ring.plan_run import RankRun, run_plans


@dataclass(frozen=True)
class PassReport:
    """One pass of one rank, the busiest in each figure; in pages of keys and values or of their gradients.

    Attributes:
        kv_buffers, gradient_buffers: most pages held at once: computed on, being sent, being received, loaded ahead.
        inner, outer: pages sent within the inner ring, and to the next node; of both kinds.
    """

    kv_buffers: int
    gradient_buffers: int
    inner: int
    outer: int


@dataclass(frozen=True)
class PlanReport:
    """Both passes."""

    forward: PassReport
    backward: PassReport


def check_plans(layout: Layout, inner: int | None = None, kind: InnerKind = "ring", page_blocks: int | None = None) -> PlanReport:
    """Check the plans of all ranks of a ring.

    Raises:
        SparseRingError: a transfer to a rank that its level does not lead to, twice to one rank, or without its counterpart; keys
            that are not those that a hop wants; a deadlock; a page's gradient that does not come home whole; pages that do not
            tile the shard or differ between ranks; a call on other queries than the rank's or other keys than those at hand; a
            pair of blocks that is not computed exactly once; a call that wrongly counts as the first or last one on its queries;
            more buffers than there is need for, or another number of transfers.
    """
    plans = [ring_plan(layout, rank, inner, kind, page_blocks) for rank in range(layout.ranks)]
    size = layout.ranks if inner is None else inner
    for rank, plan in enumerate(plans):
        _check_transfers(plan, rank, layout.ranks, size)
    report = PlanReport(_report(plans, backward=False), _report(plans, backward=True))
    for plan in plans:
        _check_pages(plan, plans[0].pages, layout.blocks_per_rank)
    _check_data(layout, plans)
    _check_coverage(layout, plans)
    _check_costs(report, _costs(layout.ranks // size, size, kind, len(plans[0].pages)))
    return report


def _report(plans: list[RingPlan], *, backward: bool) -> PassReport:
    ranks: list[RankRun] = []
    ranks.extend(RankRun(rank, ranks) for rank in range(len(plans)))
    run_plans(plans, ranks, backward=backward)
    return PassReport(
        max(state.peak["kv"] for state in ranks),
        max(state.peak["dkv"] for state in ranks),
        max(state.sent["inner"] for state in ranks),
        max(state.sent["outer"] for state in ranks),
    )


def _check_transfers(plan: RingPlan, rank: int, ranks: int, size: int) -> None:
    """What is posted at once goes through one process group, whose members all of its peers are, and to each of them once."""
    alone = {transfer for hop in plan.hops for transfer in (hop.kv_ahead, hop.dkv, hop.dkv_ahead)} | {plan.home}
    batches = {hop.kv for hop in plan.hops} | {(transfer,) for transfer in alone if transfer is not None}
    for batch in batches:
        for peers in ([transfer.send_to for transfer in batch], [transfer.receive_from for transfer in batch]):
            if len(set(peers)) < len(peers):
                raise SparseRingError(f"plan of rank {rank}: one rank twice in what is posted at once: {batch}")
            for peer, transfer in zip(peers, batch, strict=True):
                if not 0 <= peer < ranks or transfer.level != batch[0].level or _level(rank, peer, size) != transfer.level:
                    raise SparseRingError(f"plan of rank {rank}: {transfer} is not of the level that leads to rank {peer}")


def _level(rank: int, peer: int, size: int) -> Level | None:
    """Which transfers lead to a peer: those of a group that both are in."""
    (node, place), (peer_node, peer_place) = divmod(rank, size), divmod(peer, size)
    if node == peer_node:
        return "inner" if rank != peer else None
    return "outer" if place == peer_place else None


def _check_pages(plan: RingPlan, pages: Sequence[Page], blocks: int) -> None:
    begins = [0, *(page.end for page in plan.pages)]
    tiled = [(page.number, page.begin) for page in plan.pages] == list(enumerate(begins[:-1])) and begins[-1] == blocks
    loaded = tuple(hop.load for hop in plan.hops if hop.load is not None)
    if not tiled or plan.pages != pages or loaded != pages:
        raise SparseRingError(
            f"plan of rank {plan.rank}: pages {plan.pages}, of which it loads {loaded}, do not tile a shard of {blocks} blocks "
            f"as those of the other ranks do: {pages}"
        )


def _check_data(layout: Layout, plans: list[RingPlan]) -> None:
    """Calls are on this rank's queries and on what the hop's source holds of the page, each where it stands in its tensor."""
    spans = [layout.spans(rank) for rank in range(layout.ranks)]
    of_pages = {
        page: [tuple(span.cut(page.begin, page.end) for span in of_source) for of_source in spans] for page in plans[0].pages
    }
    for plan, queries in zip(plans, spans, strict=True):
        at_hand = of_pages[plan.pages[0]]
        for step, hop in enumerate(plan.hops):
            at_hand = at_hand if hop.load is None else of_pages[hop.load]
            for pair in hop.work:
                if pair.k not in at_hand[hop.source] or not any(_is_part(pair.q, span) for span in queries):
                    what = f"a call is not on its queries and the keys of {hop.source}: {pair}"
                    raise SparseRingError(f"plan of rank {plan.rank}: in hop {step} {what}")


def _is_part(part: Span, whole: Span) -> bool:
    before = part.local_begin - whole.local_begin
    inside = 0 <= before <= before + part.blocks <= whole.blocks
    return inside and part.map == BlockMap(whole.map.stride, whole.map.start + whole.map.stride * before)


def _costs(nodes: int, size: int, kind: InnerKind, pages: int) -> PlanReport:
    """The most buffers that passes need, and how much they send, with inner rings of ``size`` ranks.

    Keys and values: computed on and arriving, or all of a gathered group; between nodes also those sent ahead, once they are no
    longer computed on, and the next ones; backward, a page that is loaded ahead. Gradients: at home, travelling and arriving;
    between nodes also a round's total; a page on its last way home.
    """
    gathers, several, paged = kind == "gather" and size > 1, nodes > 1, pages > 1
    hops, home = nodes * (size - 1), nodes if several else 0
    if gathers:  # each part goes straight home
        kv, gradients, homeward = size + several, 6 if several else 4, hops
    else:  # a gradient goes on after every hop, and home at the end of each round
        kv = min(2, size * nodes) if 1 in (size, nodes) else 3 if size == 2 else 4
        gradients = 1 if size * nodes == 1 else 3 if not several else 4 if size == 1 else 5
        homeward = nodes * size if size > 1 else 0
    return PlanReport(
        PassReport(kv, 0, pages * hops, pages * (nodes - 1)),
        PassReport(kv + paged, gradients + paged, pages * (hops + homeward), pages * (nodes - 1 + home)),
    )


def _check_costs(report: PlanReport, costs: PlanReport) -> None:
    for name in ("forward", "backward"):
        found, stated = getattr(report, name), getattr(costs, name)
        held = found.kv_buffers <= stated.kv_buffers and found.gradient_buffers <= stated.gradient_buffers
        if not held or (found.inner, found.outer) != (stated.inner, stated.outer):
            raise SparseRingError(f"plan: the {name} pass takes {found}, which should be {stated} and buffers at most")


def _check_coverage(layout: Layout, plans: list[RingPlan]) -> None:
    computed = np.zeros((layout.blocks, layout.blocks), np.int32)
    for pair in (pair for plan in plans for hop in plan.hops for pair in hop.work):
        computed[_blocks(pair.q), _blocks(pair.k)] += 1
    past = np.tril(np.ones(computed.shape, bool))
    if (computed[past] != 1).any():
        q_block, k_block = np.argwhere(past & (computed != 1))[0]
        times = computed[q_block, k_block]
        raise SparseRingError(f"plan: query block {q_block} and key block {k_block} are computed {times} times")
    for plan in plans:
        _check_calls(plan, layout.blocks_per_rank)


def _blocks(span: Span) -> slice:
    return slice(span.first, span.last + 1, span.map.stride)


def _check_calls(plan: RingPlan, blocks: int) -> None:
    """The first call on a query writes its result, the last or, backward, the first one takes the columns; each is once.

    Gradients of columns leave after the first hop, so all first calls are in it. Sets of queries are bitmasks.
    """
    written = done = 0
    for step, hop in enumerate(plan.hops):
        for pair in hop.work:
            rows = (1 << pair.q.blocks) - 1 << pair.q.local_begin
            begun = written & rows if pair.first else ~written & rows
            if begun or done & rows or (pair.first and step > 0):
                raise SparseRingError(f"plan of rank {plan.rank}: in hop {step} a call is wrongly the first or last one: {pair}")
            written |= rows
            done |= rows if pair.last else 0
    if written & done != (1 << blocks) - 1:
        raise SparseRingError(f"plan of rank {plan.rank}: queries without a first or last call")
