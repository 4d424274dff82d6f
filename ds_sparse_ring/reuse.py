"""What layers have chosen, kept from one refresh to the next.

An index belongs to the segments of a batch: its rows are segments, and a diagonal reaches as far as a segment's document. It is
reused only for a batch with the same segments, document by document (one document per sequence of fixed length: every batch).
For other documents a layer chooses afresh, and keeps that in turn: packed data is never read by the pattern of other documents,
so there reuse seldom happens and saves nothing. Who balances batches by their cost (SparseBalance, arXiv 2604.13847) has other
documents in every step and expects each to get its own budget; who trains on one long document per sequence (MTraining) gets the
reuse. Refusing would stop runs for one short sequence.

Of a text itself nothing is reused: every step trains on another one, and the two halves of an index say different things about
that. A *diagonal* is a distance. It comes mostly from the head's weights and the rotary embedding (MTraining, arXiv 2510.18830,
explains slashes by it) and is assumed to drift as they do; the recall that is logged between two refreshes tells whether it does.
A *column* is a token that one text looks back to; at its place in another text stands any token. So by default diagonals are
kept, and of columns only a document's first tokens, which attract attention in every text. ``"index"`` keeps columns at their
places, too: what a user expects who fixes masks for N steps, and the only way for selectors that list tokens.

In steps that refresh, every micro-batch chooses for itself; the last one's choice is kept. Layers of all ranks of a ring reuse or
choose together: that depends on the step and the batch's segments alone. Nothing of it is saved: after a resume, layers choose
at once.
"""

from __future__ import annotations

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import Index


class IndexReuse:
    """The kept index of each layer; it takes the memory of one micro-batch's indices."""

    def __init__(self) -> None:
        self._kept: dict[int, Index] = {}

    def find(self, layer: int, segments: tuple[Segment, ...], patterns: int) -> Index | None:
        """What the layer has kept for these segments, if it has."""
        kept = self._kept.get(layer)
        return kept if kept is not None and kept.segments == segments and kept.patterns == patterns else None

    def keep(self, layer: int, index: Index) -> None:
        """In place of what the layer has kept so far."""
        self._kept[layer] = index
