"""The plan of a ring pass: a static list of hops per rank, plain data that a test can check for any number of ranks.

In hop t rank r computes on the keys and values of rank r - t. While it computes, it passes the keys and values it holds on to
rank r + 1 and receives the next ones from rank r - 1. In the backward pass the fp32 gradient of a shard of keys and values
follows its shard around the ring, collects every rank's part in a fixed order, and one last transfer takes it home.

The plan depends on the layout alone, never on the index: empty work returns at once in the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ds_sparse_ring.layout import Layout, Span


@dataclass(frozen=True)
class Transfer:
    """One exchange with the neighbours in the ring; ranks of the ring group."""

    send_to: int
    receive_from: int


@dataclass(frozen=True)
class Hop:
    """One step of the ring.

    Attributes:
        source: ring rank whose keys and values are computed on.
        kv: passes the keys and values on while they are computed on; None in the last hop.
        dkv: backward only: passes their gradient on after this hop's part was added; None with a single rank.
        work: (query span, key span) pairs that are not entirely in the causal future.
    """

    source: int
    kv: Transfer | None
    dkv: Transfer | None
    work: tuple[tuple[Span, Span], ...]


@dataclass(frozen=True)
class RingPlan:
    """The hops of one rank, in order."""

    rank: int
    hops: tuple[Hop, ...]

    @property
    def once(self) -> bool:
        """True if each query span is computed on in one piece: its result is written once, and nothing is merged."""
        queries = [q_span for hop in self.hops for q_span, _ in hop.work]
        return len(queries) == len(set(queries))


@lru_cache(maxsize=256)
def ring_plan(layout: Layout, rank: int) -> RingPlan:
    """The plan of ``rank`` for a flat ring over ``layout.ranks`` ranks (Ring Attention, arXiv 2310.01889, section 3)."""
    ranks = layout.ranks
    onward = Transfer((rank + 1) % ranks, (rank - 1) % ranks) if ranks > 1 else None
    hops = []
    for step in range(ranks):
        source = (rank - step) % ranks
        work = tuple(
            (q_span, k_span) for q_span in layout.spans(rank) for k_span in layout.spans(source) if q_span.last >= k_span.first
        )
        # a span's own keys come first: that call has its diagonal, starts its result and takes its columns
        work = tuple(sorted(work, key=lambda pair: pair[0] != pair[1]))
        hops.append(Hop(source, kv=onward if step < ranks - 1 else None, dkv=onward, work=work))
    return RingPlan(rank, tuple(hops))
