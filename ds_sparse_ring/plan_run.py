"""What a ring's plans do: the same steps as in `attention`, on names instead of tensors.

A rank's program is a list of steps: load a page, post a transfer, wait for one, compute a hop. Programs of all ranks run until
each has ended or none can go on. What a transfer carries is the number of a shard and of its page, and for gradients the set of
ranks whose part is in it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan import Hop, Page, RingPlan, Transfer

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
        SparseRingError: a transfer without its counterpart; keys that are not those that a hop wants; a deadlock; gradients that
            are not added to their like, or do not come home whole.
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
