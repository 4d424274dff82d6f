"""What a ring's plans do, found by running them as data: the same steps as in `attention`, on names instead of tensors.

A rank's program is a list of steps: load a page, post a transfer, wait for one, compute a hop. Programs of all ranks run until
each has ended or none can go on. What a transfer carries is the number of a shard and of its page, and for gradients the set of
ranks whose part is in it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BlockMap, Layout, Span
from ds_sparse_ring.plan import Hop, InnerKind, Level, Page, RingPlan, Transfer, ring_plan


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


Step = tuple[str, int]
"""What is posted, and in which hop; a page's last way home: for which page."""


class Cargo(NamedTuple):
    """A buffer with a page of a shard, or with its gradient, in which ``parts``, a bitmask of ranks, are summed."""

    buffer: int
    shard: int
    parts: int = 0
    page: int = 0


@dataclass(slots=True)
class Posted:
    """Transfers that a rank has posted at once, as by `Axes.exchange_all`: they end together. None at all: the cargo stays.

    Those of one place in ``transfers`` belong together, on all ranks that post the step.
    """

    variable: str
    step: Step
    transfers: Sequence[Transfer]
    sent: Cargo
    received: list[Cargo]
    waited: int = 0
    taken: int = 0

    @property
    def left(self) -> bool:
        """Whether there is more to wait for."""
        return self.waited < len(self.transfers)


Program = Generator[bool, None, None]


class RankRun:
    """One rank: what it has posted so far, and what its variables hold."""

    def __init__(self, rank: int, everyone: Sequence[RankRun]) -> None:
        self.rank, self.everyone = rank, everyone
        self.posted: dict[Step, Posted | None] = {}  # None: received by all that it goes to
        self.sent = {"inner": 0, "outer": 0}
        self.peak = {"kv": 0, "dkv": 0}
        self._variables: dict[str, tuple[int, ...]] = {}
        self._holders: dict[str, dict[int, int]] = {"kv": {}, "dkv": {}}
        self._buffers = 0
        self.results: dict[int, Cargo] = {}  # by page

    def new(self, shard: int, parts: int = 0, page: int = 0) -> Cargo:
        """A buffer of its own."""
        self._buffers += 1
        return Cargo(self._buffers, shard, parts, page)

    def load(self, page: Page, following: Page | None) -> Cargo:
        """A page of the rank's own keys and values, and the next one ahead."""
        kv = self.new(self.rank, page=page.number)
        self.keep("kv", kv)
        self.keep("kv ahead", *([] if following is None else [self.new(self.rank, page=following.number)]))
        return kv

    def keep(self, variable: str, *cargo: Cargo) -> None:
        """A variable now holds these buffers and no others; its name begins with the kind of what it holds."""
        kind = "dkv" if variable.startswith("dkv") else "kv"
        holders, before = self._holders[kind], self._variables.get(variable, ())
        for buffer in before:
            if holders[buffer] > 1:
                holders[buffer] -= 1
            else:
                del holders[buffer]
        if cargo or before:
            self._variables[variable] = now = tuple([x.buffer for x in cargo])
            for buffer in now:
                holders[buffer] = holders.get(buffer, 0) + 1
            if len(holders) > self.peak[kind]:
                self.peak[kind] = len(holders)

    def compute(self, step: int, hop: Hop) -> None:
        """The kernel calls of a hop; nothing here."""

    def post(self, variable: str, step: Step, transfers: Sequence[Transfer], cargo: Cargo) -> Posted:
        """`Axes.exchange_all`; each transfer has a variable, numbered."""
        received = [self.new(-1) for _ in transfers]
        posted = Posted(variable, step, transfers, cargo, received)
        if transfers:
            self.posted[step] = posted
        for i, transfer in enumerate(transfers):
            self.sent[transfer.level] += 1
            self.keep(f"{variable} {i}", cargo, received[i])
        return posted

    def wait(self, posted: Posted, *, drop: bool = False) -> Generator[bool, None, Cargo]:
        """`Exchange.wait` of the next of the transfers: yields True while one of them all has no counterpart.

        Its variable then holds what has arrived, or nothing if it is to drop it.
        """
        if not posted.transfers:
            return posted.sent
        if posted.waited == 0:
            for i, transfer in enumerate(posted.transfers):
                peer = self.everyone[transfer.receive_from]
                while posted.step not in peer.posted:
                    yield True
                theirs = peer.posted[posted.step]
                sent = theirs.transfers[i] if theirs is not None and i < len(theirs.transfers) else None
                if theirs is None or sent is None or (sent.send_to, sent.level) != (self.rank, transfer.level):
                    name, hop = posted.step
                    raise SparseRingError(
                        f"plan: rank {self.rank} waits for {name} of hop {hop} from rank {peer.rank}, which sends it elsewhere"
                    )
                posted.received[i] = Cargo(posted.received[i].buffer, *theirs.sent[1:])
                theirs.taken += 1
                if theirs.taken == len(theirs.transfers):
                    peer.posted[posted.step] = None
        i = min(posted.waited, len(posted.transfers) - 1)  # the last one may be asked for again
        posted.waited += 1
        self.keep(f"{posted.variable} {i}", *([] if drop else [posted.received[i]]))
        return posted.received[i]


def run_plans(plans: list[RingPlan], ranks: Sequence[RankRun], *, backward: bool) -> None:
    """Run the programs of all ranks until each has ended.

    Raises:
        SparseRingError: see `check_plans`.
    """
    programs = [plan_steps(plan, state, backward) for plan, state in zip(plans, ranks, strict=True)]
    left, posts = list(range(len(plans))), -1
    while left:
        # each rank goes on until it has to wait
        left = [rank for rank in left if next((True for waiting in programs[rank] if waiting), False)]
        before, posts = posts, sum(len(state.posted) for state in ranks)
        if left and posts == before:
            raise SparseRingError(f"plan: deadlock: ranks {left} wait for transfers that no one posts")
    for state in ranks:
        for (name, hop), posted in state.posted.items():
            if posted is not None:
                raise SparseRingError(f"plan: rank {state.rank} sends {name} of hop {hop} to a rank that does not wait for it")
    everyone = (1 << len(plans)) - 1
    for rank, state in enumerate(ranks):
        home = {page: (cargo.shard, cargo.parts, cargo.page) for page, cargo in state.results.items()}
        if backward and home != {page.number: (rank, everyone, page.number) for page in plans[rank].pages}:
            raise SparseRingError(f"plan: rank {rank} ends with gradients {state.results}, not with its own whole ones")


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


def plan_steps(plan: RingPlan, me: RankRun, backward: bool) -> Program:
    """The loops of `attention.ring_forward` and `attention.ring_backward`; yields False after each hop."""
    pages, returns = iter(plan.pages[1:]), _Returns(me, plan.home)
    kv, homeward = me.new(-1), _Homeward(me)
    for step, hop in enumerate(plan.hops):
        if hop.load is not None:
            following_page = next(pages, None)
            kv = me.load(hop.load, following_page if backward else None)
            arriving = following = me.post("kv following", ("kv_ahead", -1), (), kv)
        if hop.kv_ahead is not None:
            following = me.post("kv following", ("kv_ahead", step), [hop.kv_ahead], kv)
        if hop.kv:
            arriving = me.post("kv arriving", ("kv", step), hop.kv, kv)
        if kv.shard != hop.source:
            raise SparseRingError(f"plan: rank {plan.rank} holds shard {kv.shard} in hop {step}, which is for {hop.source}")
        me.compute(step, hop)
        if backward:
            me.keep("dkv", dkv := me.new(kv.shard, 1 << plan.rank, kv.page))
            yield from returns.go_on()
            yield from homeward.send(dkv, step, hop)
            if hop.ends_page:
                yield from returns.expect(homeward)
                homeward = _Homeward(me)
        yield False
        if hop.ends_page:
            continue
        if arriving.left:
            kv = yield from me.wait(arriving, drop=True)
        else:
            kv = yield from me.wait(following)
        me.keep("kv", kv)
    if backward:
        yield from returns.finish()


class _Returns:
    """`attention._Returns`."""

    def __init__(self, me: RankRun, home: Transfer | None) -> None:
        self._me, self._home = me, home
        self._homeward: _Homeward | None = None
        self._total: Posted | None = None
        self._pages = 0

    def expect(self, homeward: _Homeward) -> Program:
        yield from self.finish()
        self._homeward = homeward
        if self._home is None and not homeward.travelling:
            yield from self.finish()

    def go_on(self) -> Program:
        if self._homeward is not None:
            self._total = yield from self._homeward.end_round(("dkv_home", self._pages), self._home)
            self._me.keep("dkv returning", self._total.sent)
            self._homeward = None
            if self._home is not None:
                return
        if self._total is not None:
            total = yield from self._me.wait(self._total)
            self._me.keep("dkv returning")
            self._me.results[self._pages] = total
            self._pages += 1
            self._total = None

    def finish(self) -> Program:
        yield from self.go_on()
        yield from self.go_on()


class _Homeward:
    """`attention._Homeward`."""

    def __init__(self, me: RankRun) -> None:
        self._me = me
        self._at_home: Cargo | None = None
        self._travelling: Posted | None = None
        self._total: Posted | None = None

    @property
    def travelling(self) -> bool:
        return self._travelling is not None

    def send(self, dkv: Cargo, step: int, hop: Hop) -> Program:
        if hop.dkv_ahead is not None:
            self._total = yield from self.end_round(("dkv_ahead", step), hop.dkv_ahead)
        if self._travelling is not None:
            arrived = yield from self._me.wait(self._travelling)
            if self._at_home is None:
                dkv = _add(dkv, arrived)
            else:
                self._at_home = _add(self._at_home, arrived)
        if hop.dkv is None:
            self._at_home = dkv
            self._me.keep("dkv at home", dkv)
        else:
            self._travelling = self._me.post("dkv travelling", ("dkv", step), [hop.dkv], dkv)

    def end_round(self, step: Step, transfer: Transfer | None) -> Generator[bool, None, Posted]:
        parts = [] if self._at_home is None else [self._at_home]
        for posted in (self._travelling, self._total):
            if posted is not None:
                parts.append((yield from self._me.wait(posted)))
        self._at_home = self._travelling = self._total = None
        for variable in ("dkv at home", "dkv travelling 0"):
            self._me.keep(variable)
        return self._me.post("dkv total", step, [] if transfer is None else [transfer], reduce(_add, parts))


def _add(a: Cargo, b: Cargo) -> Cargo:
    if (a.shard, a.page) != (b.shard, b.page) or a.parts & b.parts:
        raise SparseRingError(
            f"plan: gradients of shards {a.shard} and {b.shard}, pages {a.page} and {b.page}, are added, or a rank's part twice"
        )
    return Cargo(a.buffer, a.shard, a.parts | b.parts, a.page)
