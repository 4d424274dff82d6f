"""The plan of a ring pass: a static list of hops per rank, plain data that a test can check for any number of ranks.

Flat ring: in hop t rank r computes on the keys and values of rank r - t. While it computes, it passes the keys and values it
holds on to rank r + 1 and receives the next ones from rank r - 1. In the backward pass the fp32 gradient of a shard of keys
and values follows its shard around the ring, collects every rank's part in a fixed order, and one last transfer takes it home.

Hierarchical ring (as in MTraining, arXiv 2510.18830): the ring is cut into inner rings of neighbouring ranks, those of a node. A
*round* is one turn of the inner rings; as it begins, every rank passes its shard on to its counterpart in the next node, so
that the slow transfer may last as long as the whole round. Backward: a round ends with each shard's gradient, summed over the
inner ring, back at the rank that the shard began the round on; there it is added to the sum of the nodes before and
passed on while the next round runs.

Gathered group: instead of turning, an inner ring may send every shard to all of its ranks at once, as a round begins: one launch
and one latency instead of one for each hop, for as many buffers as the group has ranks. Hops and bytes of keys and values
stay the same, and a group of all ranks is a plain all-gather. Backward: as soon as a hop is done, its part goes straight home,
where parts are added in the order of the ring: the same bits, for one transfer fewer. A reduce-scatter at the end of the round
would send no less, hold all parts at once, hide behind no work, and leave the order of the sum to the library.

Pages (for keys and values in host memory, after FPDT, arXiv 2408.16978): shards are cut into pages of so many local blocks, and
page after page goes around the ring by the same hops, so that a device holds a few pages and never a shard. FPDT's loop over
pairs of chunks fetches keys and values once for each chunk of queries, which a sparse index cannot hide; here the queries of a
layer stay, each page is fetched once, and the ring carries the same bytes. In a ring of one rank it is a plain loop over pages. A
page holds the diagonal of its own queries, so none is inactive as a whole, whatever the index; queries before it are left out of
its calls. A page's gradient goes its last way home while the next page's first hops run.

The plan depends on the layout alone, never on the index: empty work returns at once in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK, Layout, Span

Level = Literal["inner", "outer"]
InnerKind = Literal["ring", "gather"]


@dataclass(frozen=True)
class Transfer:
    """One exchange within an inner ring, or with the counterparts in the neighbouring ones; ranks of the ring."""

    send_to: int
    receive_from: int
    level: Level = "inner"


@dataclass(frozen=True)
class Page:
    """Local blocks ``[begin, end)`` of every rank's shard, whose keys and values go around the ring together."""

    number: int
    begin: int
    end: int

    @property
    def tokens(self) -> slice:
        """The page's rows in a rank's local tensors."""
        return slice(self.begin * BLOCK, self.end * BLOCK)


@dataclass(frozen=True)
class Pair:
    """A span of queries and a span of keys that attention is computed on in one call.

    Attributes:
        q: rows of the rank's shard. k: rows of the page.
        first, last: of the calls on a rank's span of queries, which are about all of it. The first one writes its results, the
            others merge into them. The columns are done with the last one forward and with the first one backward, so that
            their sums over the ring hide behind the hops between.
    """

    q: Span
    k: Span
    first: bool
    last: bool


@dataclass(frozen=True)
class Hop:
    """One step of the ring.

    Attributes:
        source: ring rank whose keys and values are computed on.
        load: first hop of a page: this rank's own part of it comes from where it is kept.
        ends_page: last hop of a page: backward, its gradient is on its last way home while the next hop, if any, is computed.
        kv: passes the keys and values on while they are computed on. What arrives is for the next hops, in order: for the next
            one, or, as a gathered group's round begins, for all that are left of it.
        kv_ahead: first hop of a round: passes the same keys and values on to the next node; what arrives begins the next round.
        dkv: backward only: passes their gradient on after this hop's part was added, or sends this hop's part home. None: the
            part is at home; the others of the round are added to it.
        dkv_ahead: backward only, first hop of a later round: passes on what the round before has summed up.
        work: pairs of spans that are not entirely in the causal future.
    """

    source: int
    load: Page | None
    ends_page: bool
    kv: tuple[Transfer, ...]
    kv_ahead: Transfer | None
    dkv: Transfer | None
    dkv_ahead: Transfer | None
    work: tuple[Pair, ...]


@dataclass(frozen=True)
class RingPlan:
    """The hops of one rank, in order, page by page.

    Attributes:
        home: backward: takes a page's sums of the last round home, None in a flat ring.
    """

    rank: int
    pages: tuple[Page, ...]
    hops: tuple[Hop, ...]
    home: Transfer | None

    @cached_property
    def once(self) -> bool:
        """True if each query span is computed on in one piece: its result is written once, and nothing is merged."""
        return all(pair.first and pair.last for hop in self.hops for pair in hop.work)


# Asked for twice a layer, which takes about 1 us. A batch with another number of blocks costs 0.06 ms for a ring of 8 ranks and 2
# ms for one of 512, so it matters little how many are kept; 256 plans for 512 ranks are 64 MiB.
@lru_cache(maxsize=256)
def ring_plan(
    layout: Layout, rank: int, inner: int | None = None, kind: InnerKind = "ring", page_blocks: int | None = None
) -> RingPlan:
    """The plan of ``rank`` for a ring over ``layout.ranks`` ranks (Ring Attention, arXiv 2310.01889, section 3).

    Args:
        inner: ranks of an inner ring, neighbours; None: one flat ring.
        kind: whether keys and values turn in an inner ring or are gathered at once.
        page_blocks: blocks of a page; the last one may be shorter. None: a shard is one page.

    Raises:
        SparseRingError: inner rings of that size do not fill the ring.
    """
    ranks, size = layout.ranks, layout.ranks if inner is None else inner
    if size < 1 or ranks % size:
        raise SparseRingError(f"plan: inner rings of {size} ranks do not divide a ring of {ranks}")
    nodes, (node, place) = ranks // size, divmod(rank, size)
    kv, dkv = _inner_transfers(place, size, node * size, kind)
    outward = _shift(node, 1, nodes, lambda x: x * size + place, "outer") if nodes > 1 else None
    steps = [(turn, step) for turn in range(nodes) for step in range(size)]
    sources = [(node - turn) % nodes * size + (place - step) % size for turn, step in steps]
    pages, spans = _pages(layout.blocks_per_rank, page_blocks), _spans(layout)
    work = iter(_work(spans[rank], [(page, spans[source]) for page in pages for source in sources], paged=len(pages) > 1))
    hops = [
        Hop(
            source,
            load=page if (turn, step) == (0, 0) else None,
            ends_page=(turn, step) == steps[-1],
            kv=kv[step],
            kv_ahead=outward if step == 0 and turn < nodes - 1 else None,
            dkv=dkv[step],
            dkv_ahead=outward if step == 0 and turn > 0 else None,
            work=next(work),
        )
        for page in pages
        for (turn, step), source in zip(steps, sources, strict=True)
    ]
    return RingPlan(rank, pages, tuple(hops), home=outward)


def _pages(blocks: int, page_blocks: int | None) -> tuple[Page, ...]:
    size = blocks if page_blocks is None else page_blocks
    return tuple(Page(number, begin, min(begin + size, blocks)) for number, begin in enumerate(range(0, blocks, size)))


def _inner_transfers(
    place: int, size: int, first: int, kind: InnerKind
) -> tuple[list[tuple[Transfer, ...]], list[Transfer | None]]:
    """Of keys and values, and of gradients, for each hop of a round."""

    def shift(by: int) -> Transfer:
        return _shift(place, by, size, lambda x: first + x, "inner")

    if size == 1:
        return [()], [None]
    if kind == "ring":
        return [(shift(1),)] * (size - 1) + [()], [shift(1)] * size
    everyone = tuple(shift(by) for by in range(1, size))
    return [everyone] + [()] * (size - 1), [None, *(shift(-by) for by in range(1, size))]


def _shift(place: int, by: int, size: int, rank_of: Callable[[int], int], level: Level) -> Transfer:
    """To the place that is ``by`` further, and from the one that is as far before."""
    return Transfer(rank_of((place + by) % size), rank_of((place - by) % size), level)


@lru_cache(maxsize=8)
def _spans(layout: Layout) -> list[tuple[Span, ...]]:
    """Of each rank: the plans of all ranks share them."""
    return [layout.spans(rank) for rank in range(layout.ranks)]


def _work(
    queries: tuple[Span, ...], keys_of_hops: Sequence[tuple[Page, tuple[Span, ...]]], *, paged: bool
) -> list[tuple[Pair, ...]]:
    """For each hop the pairs that are not in the future. A span's own keys come first: that call has its diagonal."""
    calls = []
    for hop, (page, keys) in enumerate(keys_of_hops):
        parts = [(whole, whole.cut(page.begin, page.end)) for whole in keys]
        of_hop = [(hop, q, k, q != whole) for q in queries for whole, k in parts if k.blocks > 0 and q.last >= k.first]
        calls += sorted(of_hop, key=lambda call: call[3])
    last = {q: at for at, (_, q, *_) in enumerate(calls)}
    first = {q: at for at, (_, q, *_) in reversed(list(enumerate(calls)))}
    work: list[list[Pair]] = [[] for _ in keys_of_hops]
    for at, (hop, q, k, _) in enumerate(calls):
        is_first, is_last = first[q] == at, last[q] == at
        rows = q.since(k.first) if paged and not (is_first or is_last) else q
        work[hop].append(Pair(rows, k, is_first, is_last))
    return [tuple(pairs) for pairs in work]
