"""The plan of a ring pass: a static list of hops per rank, plain data that a test can check for any number of ranks.

Flat ring: in hop t rank r computes on the keys and values of rank r - t. While it computes, it passes the keys and values it
holds on to rank r + 1 and receives the next ones from rank r - 1. In the backward pass the fp32 gradient of a shard of keys
and values follows its shard around the ring, collects every rank's part in a fixed order, and one last transfer takes it home.

Hierarchical ring (as in MTraining, arXiv 2510.18830): the ring is cut into inner rings of neighbouring ranks, those of a node. A
*round* is one turn of the inner rings; as it begins, every rank passes its shard on to its counterpart in the next node, so
that the slow transfer may last as long as the whole round. Backward: a round ends with each shard's gradient, summed over the
inner ring, back at the rank that the shard began the round on; there it is added to the sum of the nodes before and
passed on while the next round runs.

The plan depends on the layout alone, never on the index: empty work returns at once in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import Layout, Span

Level = Literal["inner", "outer"]


@dataclass(frozen=True)
class Transfer:
    """One exchange with the neighbours in an inner ring, or with the counterparts in the neighbouring ones; ranks of the ring."""

    send_to: int
    receive_from: int
    level: Level = "inner"


@dataclass(frozen=True)
class Hop:
    """One step of the ring.

    Attributes:
        source: ring rank whose keys and values are computed on.
        kv: passes the keys and values on while they are computed on; None in the last hop of a round.
        kv_ahead: first hop of a round: passes the same keys and values on to the next node; what arrives begins the next round.
        dkv: backward only: passes their gradient on after this hop's part was added; None in an inner ring of one rank.
        dkv_ahead: backward only, first hop of a later round: passes on what the round before has summed up.
        work: (query span, key span) pairs that are not entirely in the causal future.
    """

    source: int
    kv: Transfer | None
    kv_ahead: Transfer | None
    dkv: Transfer | None
    dkv_ahead: Transfer | None
    work: tuple[tuple[Span, Span], ...]


@dataclass(frozen=True)
class RingPlan:
    """The hops of one rank, in order; ``home``: backward, takes the sums of the last round home, None in a flat ring."""

    rank: int
    hops: tuple[Hop, ...]
    home: Transfer | None

    @property
    def once(self) -> bool:
        """True if each query span is computed on in one piece: its result is written once, and nothing is merged."""
        queries = [q_span for hop in self.hops for q_span, _ in hop.work]
        return len(queries) == len(set(queries))


@lru_cache(maxsize=256)
def ring_plan(layout: Layout, rank: int, inner: int | None = None) -> RingPlan:
    """The plan of ``rank`` for a ring over ``layout.ranks`` ranks (Ring Attention, arXiv 2310.01889, section 3).

    Args:
        inner: ranks of an inner ring, neighbours; None: one flat ring.

    Raises:
        SparseRingError: inner rings of that size do not fill the ring.
    """
    ranks, size = layout.ranks, layout.ranks if inner is None else inner
    if size < 1 or ranks % size:
        raise SparseRingError(f"plan: inner rings of {size} ranks do not divide a ring of {ranks}")
    nodes, (node, place) = ranks // size, divmod(rank, size)
    onward = _neighbours(place, size, lambda x: node * size + x, "inner")
    outward = _neighbours(node, nodes, lambda x: x * size + place, "outer")
    hops = []
    for turn in range(nodes):
        for step in range(size):
            source = (node - turn) % nodes * size + (place - step) % size
            hops.append(
                Hop(
                    source,
                    kv=onward if step < size - 1 else None,
                    kv_ahead=outward if step == 0 and turn < nodes - 1 else None,
                    dkv=onward,
                    dkv_ahead=outward if step == 0 and turn > 0 else None,
                    work=_work(layout, rank, source),
                )
            )
    return RingPlan(rank, tuple(hops), home=outward)


def _neighbours(place: int, size: int, rank_of: Callable[[int], int], level: Level) -> Transfer | None:
    """To the next place and from the one before; None where there is one place only."""
    return Transfer(rank_of((place + 1) % size), rank_of((place - 1) % size), level) if size > 1 else None


def _work(layout: Layout, rank: int, source: int) -> tuple[tuple[Span, Span], ...]:
    """Span pairs that are not in the future. A span's own keys come first: that call has its diagonal and takes its columns."""
    pairs = [(q, k) for q in layout.spans(rank) for k in layout.spans(source) if q.last >= k.first]
    return tuple(sorted(pairs, key=lambda pair: pair[0] != pair[1]))
