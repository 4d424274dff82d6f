"""What a ring's plans do, found by running them as data: the same steps as in `attention`, on names instead of tensors.

A rank's program is a list of steps: post a transfer, wait for one, compute a hop. Programs of all ranks run until each has
ended or none can go on. What a transfer carries is a shard's number, and for gradients the set of ranks whose part is in it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import Layout
from ds_sparse_ring.plan import Hop, RingPlan, Transfer, ring_plan


@dataclass(frozen=True)
class PassReport:
    """One pass of one rank, the busiest in each figure; in shards of keys and values or of their gradients.

    Attributes:
        kv_buffers, gradient_buffers: most shards held at once: computed on, being sent, being received.
        inner, outer: shards sent to the neighbour in the inner ring, and to the next node; of both kinds.
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


def check_plans(layout: Layout, inner: int | None = None) -> PlanReport:
    """Check the plans of all ranks of a ring.

    Raises:
        SparseRingError: a pair of blocks that is not computed exactly once, keys that are not those that a hop wants, a transfer
            without its counterpart, a deadlock, or a gradient that does not come home whole.
    """
    plans = [ring_plan(layout, rank, inner) for rank in range(layout.ranks)]
    _check_coverage(layout, plans)
    return PlanReport(_report(plans, backward=False), _report(plans, backward=True))


def _check_coverage(layout: Layout, plans: list[RingPlan]) -> None:
    computed = np.zeros((layout.blocks, layout.blocks), np.int32)
    for plan in plans:
        for hop in plan.hops:
            for q, k in hop.work:
                computed[q.first : q.last + 1 : q.map.stride, k.first : k.last + 1 : k.map.stride] += 1
    past = np.tril(np.ones(computed.shape, bool))
    if (computed[past] != 1).any():
        q_block, k_block = np.argwhere(past & (computed != 1))[0]
        times = computed[q_block, k_block]
        raise SparseRingError(f"plan: query block {q_block} and key block {k_block} are computed {times} times")


@dataclass(frozen=True)
class Cargo:
    """A buffer with a shard of keys and values, or with its gradient, in which ``parts``, a bitmask of ranks, are summed."""

    buffer: int
    shard: int
    parts: int = 0


@dataclass
class PostedTransfer:
    """A transfer that a rank has posted, as `comm.Exchange`."""

    step: tuple[str, int]
    transfer: Transfer | None
    sent: Cargo
    received: Cargo | None = None


Program = Generator[bool, None, None]


class RankRun:
    """One rank: what it has posted so far, and what its variables hold."""

    def __init__(self, rank: int, everyone: Sequence[RankRun]) -> None:
        self.rank, self.everyone = rank, everyone
        self.posted: dict[tuple[str, int], PostedTransfer] = {}
        self.sent = {"inner": 0, "outer": 0}
        self.peak = {"kv": 0, "dkv": 0}
        self._variables: dict[str, dict[str, tuple[int, ...]]] = {"kv": {}, "dkv": {}}
        self._buffers = 0
        self.result: Cargo | None = None

    def new(self, shard: int, parts: int = 0) -> Cargo:
        """A buffer of its own."""
        self._buffers += 1
        return Cargo(self._buffers, shard, parts)

    def keep(self, variable: str, *cargo: Cargo) -> None:
        """A variable now holds these buffers and no others; its name begins with the kind of what it holds."""
        kind = "dkv" if variable.startswith("dkv") else "kv"
        variables = self._variables[kind]
        variables[variable] = tuple(x.buffer for x in cargo)
        if sum(map(len, variables.values())) > self.peak[kind]:  # otherwise there is no need to look which are the same
            self.peak[kind] = max(self.peak[kind], len({b for held in variables.values() for b in held}))

    def compute(self, step: int, hop: Hop) -> None:
        """The kernel calls of a hop; nothing here."""

    def post(self, variable: str, step: tuple[str, int], transfer: Transfer | None, cargo: Cargo) -> PostedTransfer:
        """`Axes.exchange`."""
        exchange = self.posted[step] = PostedTransfer(step, transfer, cargo)
        if transfer is None:
            exchange.received = cargo
        else:
            self.sent[transfer.level] += 1
            self.keep(variable, cargo, self.new(-1))
        return exchange

    def wait(self, variable: str, exchange: PostedTransfer) -> Generator[bool, None, Cargo]:
        """`Exchange.wait`: yields True while what is to be received has not been sent."""
        if exchange.received is None:
            assert exchange.transfer is not None
            peer = self.everyone[exchange.transfer.receive_from]
            while exchange.step not in peer.posted:
                yield True
            theirs = peer.posted[exchange.step]
            sent_to = theirs.transfer and (theirs.transfer.send_to, theirs.transfer.level)
            if sent_to != (self.rank, exchange.transfer.level):
                name, hop = exchange.step
                raise SparseRingError(
                    f"plan: rank {self.rank} waits for {name} of hop {hop} from rank {peer.rank}, which sends it elsewhere"
                )
            exchange.received = self.new(theirs.sent.shard, theirs.sent.parts)
        self.keep(variable, exchange.received)
        return exchange.received


def run_plans(plans: list[RingPlan], ranks: Sequence[RankRun], *, backward: bool) -> None:
    """Run the programs of all ranks until each has ended.

    Raises:
        SparseRingError: see `check_plans`.
    """
    programs = [plan_steps(plan, state, backward) for plan, state in zip(plans, ranks, strict=True)]
    left, posted = list(range(len(plans))), -1
    while left:
        # each rank goes on until it has to wait
        left = [rank for rank in left if next((True for waiting in programs[rank] if waiting), False)]
        before, posted = posted, sum(len(state.posted) for state in ranks)
        if left and posted == before:
            raise SparseRingError(f"plan: deadlock: ranks {left} wait for transfers that no one posts")
    everyone = (1 << len(plans)) - 1
    for rank, state in enumerate(ranks):
        if backward and (state.result is None or (state.result.shard, state.result.parts) != (rank, everyone)):
            raise SparseRingError(f"plan: rank {rank} ends with gradient {state.result}, not with its own whole one")


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
    kv = me.new(plan.rank)
    me.keep("kv", kv)
    following = me.post("kv following", ("kv_ahead", -1), None, kv)
    travelling: PostedTransfer | None = None
    total: PostedTransfer | None = None
    for step, hop in enumerate(plan.hops):
        if hop.kv_ahead is not None:
            following = me.post("kv following", ("kv_ahead", step), hop.kv_ahead, kv)
        arriving = me.post("kv arriving", ("kv", step), hop.kv, kv) if hop.kv is not None else following
        if kv.shard != hop.source:
            raise SparseRingError(f"plan: rank {plan.rank} holds shard {kv.shard} in hop {step}, which is for {hop.source}")
        me.compute(step, hop)
        if backward:
            dkv = me.new(kv.shard, 1 << plan.rank)
            me.keep("dkv", dkv)
            if hop.dkv_ahead is not None and travelling is not None:
                total = yield from _pass_on(me, travelling, total, ("dkv_ahead", step), hop.dkv_ahead)
                travelling = None
            if travelling is not None:
                dkv = _add(dkv, (yield from me.wait("dkv travelling", travelling)))
            travelling = me.post("dkv travelling", ("dkv", step), hop.dkv, dkv)
        yield False
        kv = yield from me.wait("kv following" if arriving is following else "kv arriving", arriving)
        me.keep("kv", kv)
    if travelling is not None:
        home = yield from _pass_on(me, travelling, total, ("dkv_ahead", len(plan.hops)), plan.home)
        me.result = yield from me.wait("dkv total", home)


def _pass_on(
    me: RankRun, returning: PostedTransfer, total: PostedTransfer | None, step: tuple[str, int], transfer: Transfer | None
) -> Generator[bool, None, PostedTransfer]:
    dkv = yield from me.wait("dkv travelling", returning)
    if total is not None:
        dkv = _add(dkv, (yield from me.wait("dkv total", total)))
    return me.post("dkv total", step, transfer, dkv)


def _add(a: Cargo, b: Cargo) -> Cargo:
    if a.shard != b.shard or a.parts & b.parts:
        raise SparseRingError(f"plan: gradients of shards {a.shard} and {b.shard} are added, or a rank's part twice")
    return Cargo(a.buffer, a.shard, a.parts | b.parts)
