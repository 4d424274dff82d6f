"""Documents on block boundaries, and the segments of query blocks that share one selection.

A stream holds documents one after the other, each padded at its end to whole blocks, so that a block has one document. The
blocks behind the last document are padding of the layout. Padding needs no key mask: its tokens come after every valid query
of their document, where the causal mask hides them.

A *segment* is a run of query blocks of one document. Columns and diagonals are chosen per segment (with one selection per
document, queries far from the probe lose the keys that only they need).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK


@dataclass(frozen=True)
class Segment:
    """Query blocks ``[begin, end)`` of the document that starts at block ``document_begin``.

    ``valid_end`` is the global token id one past the segment's last valid token; a segment of layout padding has none, and
    ``valid_end == begin * BLOCK``.
    """

    begin: int
    end: int
    document_begin: int
    valid_end: int

    @property
    def is_padding(self) -> bool:
        """True for the blocks behind the last document."""
        return self.valid_end <= self.begin * BLOCK

    @property
    def opens_document(self) -> bool:
        """True for the first segment of its document."""
        return self.begin == self.document_begin


def blocks_of(tokens: int) -> int:
    """Blocks that ``tokens`` tokens take."""
    return -(-tokens // BLOCK)


def document_begins(lengths: SequenceOf[int]) -> list[int]:
    """First block of each document of ``lengths`` tokens."""
    begins, block = [], 0
    for length in lengths:
        begins.append(block)
        block += blocks_of(length)
    return begins


def make_segments(lengths: SequenceOf[int], total_blocks: int, segment_tokens: int | None) -> tuple[Segment, ...]:
    """Cut documents into segments of at most ``segment_tokens`` tokens, as equal as whole blocks allow.

    Args:
        lengths: valid tokens of each document, in stream order.
        total_blocks: blocks of the stream, layout padding included.
        segment_tokens: a positive multiple of BLOCK, or None for one segment per document.

    Raises:
        SparseRingError: an empty document, or documents that do not fit into ``total_blocks``.
    """
    segments: list[Segment] = []
    for length, first in zip(lengths, document_begins(lengths), strict=True):
        if length < 1:
            raise SparseRingError("documents: a document needs at least one token")
        blocks = blocks_of(length)
        pieces = 1 if segment_tokens is None else -(-blocks * BLOCK // segment_tokens)
        bounds = [first + piece * blocks // pieces for piece in range(pieces + 1)]
        for begin, end in zip(bounds, bounds[1:], strict=False):
            segments.append(Segment(begin, end, first, min(end * BLOCK, first * BLOCK + length)))
    used = segments[-1].end if segments else 0
    if used > total_blocks:
        raise SparseRingError(f"documents: they take {used} blocks, the layout holds {total_blocks}")
    if used < total_blocks:
        segments.append(Segment(used, total_blocks, used, used * BLOCK))
    return tuple(segments)
