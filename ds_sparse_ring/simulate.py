"""Time of attention over a ring, from the very plans that training runs: a discrete-event run of all ranks' programs.

A rank computes one hop after the other. What it posts within its inner ring, and between these, stands in one queue each, as on
the streams of NCCL's communicators: it begins when it is first in the queues of both sides and takes latency + bytes / bandwidth.
What is posted at once has one latency and ends together. Compute times come from the pairs that a hop has and a rate. In the
backward pass pages come from host memory: each is copied from the moment on when the page before is taken.

Shapes: H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ds_sparse_ring.hardware import Hardware
from ds_sparse_ring.layout import BLOCK, Layout, Span
from ds_sparse_ring.plan import Hop, InnerKind, Level, Page, Transfer, ring_plan
from ds_sparse_ring.plan_run import Cargo, Posted, RankRun, Step, run_plans


@dataclass(frozen=True)
class Work:
    """What one layer's attention does, with times in ms.

    Attributes:
        pair_ms: of one (query, key) pair, all heads. density: active share of the causal pairs; columns: share of all causal
            pairs that are columns, computed with a rank's own keys.
        kv_bytes: of a shard of keys and values; gradient_bytes: of its gradients.
    """

    pair_ms: float
    density: float
    columns: float
    kv_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class Links:
    """Transfers between the ranks of a ring, and from host memory.

    Attributes:
        ranks_apart: neighbours in the ring are so many ranks apart (Ulysses).
    """

    node_ranks: int
    inner_gb_s: float
    outer_gb_s: float
    latency_ms: float
    ranks_apart: int = 1
    host_gb_s: float = float("inf")

    @classmethod
    def of(cls, hardware: Hardware, ranks_apart: int = 1) -> Links:
        """Those of a profile."""
        h = hardware
        return cls(h.node_ranks, h.inner_gb_s, h.outer_gb_s, h.latency_ms, ranks_apart, h.host_gb_s)

    def ms(self, a: int, b: int, size_bytes: float) -> float:
        """Time of a transfer between two ranks of the ring, without the latency."""
        inside = a * self.ranks_apart // self.node_ranks == b * self.ranks_apart // self.node_ranks
        return size_bytes / (self.inner_gb_s if inside else self.outer_gb_s) / 1e6


@dataclass(frozen=True)
class Event:
    """Something that took time on a rank: ``lane`` is "compute", "wait", "send inner", "send outer" or "load"; ms."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class PassTime:
    """One pass of one layer's attention, ms.

    Attributes:
        total: until the last rank has ended. compute: mean over ranks. exposed: mean time that ranks wait, for transfers and
            for pages. imbalance: busiest rank over the mean. hop_imbalance: mean over hops of the slowest rank's compute over
            the mean rank's. by_hop: compute of each hop, mean over ranks. sent: bytes that leave a rank at each level, mean
            over ranks.
    """

    total: float
    compute: float
    exposed: float
    imbalance: float
    hop_imbalance: float
    by_hop: tuple[float, ...]
    sent: Mapping[Level, float]
    events: tuple[Event, ...]


class _TimedRank(RankRun):
    def __init__(self, rank: int, everyone: Sequence[_TimedRank], run: _Timing) -> None:
        super().__init__(rank, everyone)
        self.run, self.clock = run, 0.0
        self.others = everyone
        self.transfers: dict[Step, Sequence[Transfer]] = {}
        self.posted_at: dict[Step, float] = {}
        self.before: dict[Step, Step | None] = {}  # what stands before a step in the queue of its level
        self.queued: dict[str, Step] = {}  # what was queued last
        self.ends: dict[Step, float] = {}
        self.pages: dict[Step, int] = {}  # whose page a step sends
        self.loaded = 0.0  # when the page that is being loaded will be there
        self.hop_ms: list[float] = []
        self.waited = 0.0
        self.sent_bytes: dict[Level, float] = {"inner": 0.0, "outer": 0.0}

    def load(self, page: Page, following: Page | None) -> Cargo:
        if self.run.from_host:
            if page.number == 0:
                self._begin_to_load(page)
            self._wait_until(self.loaded, f"load page {page.number}")
            if following is not None:
                self._begin_to_load(following)
        return super().load(page, following)

    def _begin_to_load(self, page: Page) -> None:
        self.loaded = self.clock + self.run.bytes_of("kv", page.number) / self.run.links.host_gb_s / 1e6
        self.run.events.append(Event(self.rank, "load", f"page {page.number}", self.clock, self.loaded))

    def _wait_until(self, end: float, what: str) -> None:
        if end > self.clock:
            self.run.events.append(Event(self.rank, "wait", what, self.clock, end))
            self.waited += end - self.clock
            self.clock = end

    def compute(self, step: int, hop: Hop) -> None:
        ms = self.run.hop_ms(hop)
        self.hop_ms.append(ms)
        self.run.events.append(Event(self.rank, "compute", f"hop {step}: keys of {hop.source}", self.clock, self.clock + ms))
        self.clock += ms

    def post(self, variable: str, step: Step, transfers: Sequence[Transfer], cargo: Cargo) -> Posted:
        if transfers:
            level = transfers[0].level
            self.transfers[step], self.posted_at[step] = transfers, self.clock
            self.before[step], self.queued[level] = self.queued.get(level), step
            self.pages[step] = cargo.page
            self.sent_bytes[level] += len(transfers) * self.run.bytes_of(step[0], cargo.page)
        return super().post(variable, step, transfers, cargo)

    def wait(self, posted: Posted, *, drop: bool = False) -> Generator[bool, None, Cargo]:
        cargo = yield from super().wait(posted, drop=drop)
        if posted.transfers:
            while (end := self.end(posted.step)) is None:
                yield True
            self._wait_until(end, posted.step[0])
        return cargo

    def begin(self, step: Step) -> float | None:
        """When this rank is ready for what it has posted: what stands before it has ended. None: not known yet."""
        if step not in self.posted_at:
            return None
        before = self.before[step]
        free = 0.0 if before is None else self.end(before)
        return None if free is None else max(free, self.posted_at[step])

    def end(self, step: Step) -> float | None:
        """When all of a step has been sent and received: both sides of each transfer have to be ready."""
        if step not in self.ends:
            transfers = self.transfers[step]
            to, sources = [t.send_to for t in transfers], [t.receive_from for t in transfers]
            begins = [self.others[rank].begin(step) for rank in {self.rank, *to, *sources}]
            known = [begin for begin in begins if begin is not None]
            if len(known) < len(begins):
                return None
            links, size_bytes = self.run.links, self.run.bytes_of(step[0], self.pages[step])
            sent = links.latency_ms + sum(links.ms(self.rank, rank, size_bytes) for rank in to)
            received = links.latency_ms + sum(links.ms(rank, self.rank, size_bytes) for rank in sources)
            begin, name = max(known), f"{step[0]} to {', '.join(map(str, to))}"
            self.run.events.append(Event(self.rank, f"send {transfers[0].level}", name, begin, begin + sent))
            self.ends[step] = begin + max(sent, received)
        return self.ends[step]


@dataclass
class _Timing:
    work: Work
    links: Links
    backward: bool
    events: list[Event]
    shares: list[float]  # of a shard, of each page
    from_host: bool

    def hop_ms(self, hop: Hop) -> float:
        pairs = sum(causal_pairs(pair.q, pair.k) for pair in hop.work) * (self.work.density - self.work.columns)
        with_columns = (pair.q for pair in hop.work if (pair.first if self.backward else pair.last))
        pairs += self.work.columns * sum(map(_pairs_before, with_columns))
        return pairs * self.work.pair_ms

    def bytes_of(self, name: str, page: int) -> float:
        return self.shares[page] * (self.work.gradient_bytes if name.startswith("dkv") else self.work.kv_bytes)


def simulate_pass(
    layout: Layout,
    inner: int | None,
    work: Work,
    links: Links,
    *,
    backward: bool,
    kind: InnerKind = "ring",
    page_blocks: int | None = None,
) -> PassTime:
    """One pass of one layer's attention over a ring; ``page_blocks``: of pages that are kept in host memory."""
    plans = [ring_plan(layout, rank, inner, kind, page_blocks) for rank in range(layout.ranks)]
    shares = [(page.end - page.begin) / layout.blocks_per_rank for page in plans[0].pages]
    timing = _Timing(work, links, backward, [], shares, from_host=backward and page_blocks is not None)
    ranks: list[_TimedRank] = []
    ranks.extend(_TimedRank(rank, ranks, timing) for rank in range(layout.ranks))
    run_plans(plans, ranks, backward=backward)
    hops = np.array([rank.hop_ms for rank in ranks])
    by_rank, (of_ranks, of_hops) = hops.sum(1), imbalances(hops)
    return PassTime(
        total=max(rank.clock for rank in ranks),
        compute=float(by_rank.mean()),
        exposed=float(np.mean([rank.waited for rank in ranks])),
        imbalance=of_ranks,
        hop_imbalance=of_hops,
        by_hop=tuple(hops.mean(0).tolist()),
        sent={level: float(np.mean([rank.sent_bytes[level] for rank in ranks])) for level in ranks[0].sent_bytes},
        events=tuple(timing.events),
    )


def imbalances(hops: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Of work by rank and hop ``[R, hops]``: busiest rank over the mean; mean over hops of the slowest rank over the mean.

    Hops without work do not count.
    """
    by_rank, by_hop = hops.sum(1), hops.mean(0)
    there = by_hop > 0
    return float(by_rank.max() / by_rank.mean()), float((hops.max(0)[there] / by_hop[there]).mean())


@lru_cache(maxsize=1 << 16)
def causal_pairs(q: Span, k: Span) -> int:
    """(query, key) pairs of two spans that are not in the future."""
    rows = q.map.stride * np.arange(q.blocks, dtype=np.int64) + q.map.start
    counts = ((rows - k.map.start) // k.map.stride + 1).clip(0, k.blocks)
    own = int(((rows >= k.first) & (rows <= k.last) & ((rows - k.map.start) % k.map.stride == 0)).sum())
    return int(counts.sum()) * BLOCK * BLOCK - own * BLOCK * (BLOCK - 1) // 2


@lru_cache(maxsize=1 << 12)
def _pairs_before(q: Span) -> int:
    """Causal pairs of a span's queries with the whole sequence."""
    rows = q.map.stride * np.arange(q.blocks, dtype=np.int64) + q.map.start
    return int(rows.sum()) * BLOCK * BLOCK + q.blocks * BLOCK * (BLOCK + 1) // 2


def save_trace(events: Sequence[Event], path: Path) -> None:
    """A Chrome trace (chrome://tracing, Perfetto): a process per rank, a thread per lane."""
    lanes = {"compute": 0, "wait": 1, "send inner": 2, "send outer": 3, "load": 4}
    names = [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
        for rank in sorted({e.rank for e in events})
        for lane, tid in lanes.items()
    ]
    spans = [
        {"ph": "X", "name": e.name, "pid": e.rank, "tid": lanes[e.lane], "ts": 1e3 * e.begin, "dur": 1e3 * (e.end - e.begin)}
        for e in events
    ]
    path.write_text(json.dumps({"traceEvents": names + spans}), encoding="utf-8")
