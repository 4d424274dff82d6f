"""Segments cover every block once, never cross a document, and are as long as asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse_ring.documents import blocks_of, make_segments
from ds_sparse_ring.errors import SparseRingError

lengths_strategy = st.lists(st.integers(1, 1500), min_size=1, max_size=8)
segment_strategy = st.one_of(st.none(), st.integers(1, 10).map(lambda blocks: 64 * blocks))


@given(lengths_strategy, st.integers(0, 5), segment_strategy)
def test_segments_tile_the_stream(lengths: list[int], padding: int, segment_tokens: int | None) -> None:
    used = sum(blocks_of(length) for length in lengths)
    segments = make_segments(lengths, used + padding, segment_tokens)
    assert segments[0].begin == 0 and segments[-1].end == used + padding
    assert all(a.end == b.begin for a, b in zip(segments, segments[1:], strict=False))
    assert all(s.end > s.begin for s in segments)
    valid = [s for s in segments if not s.is_padding]
    assert sum(s.valid_end - s.begin * 64 for s in valid) == sum(lengths)
    if segment_tokens is not None:
        assert all((s.end - s.begin) * 64 <= segment_tokens for s in valid)


@given(lengths_strategy, segment_strategy)
def test_a_segment_has_one_document_and_says_where_it_begins(lengths: list[int], segment_tokens: int | None) -> None:
    used = sum(blocks_of(length) for length in lengths)
    begins = [sum(blocks_of(x) for x in lengths[:i]) for i in range(len(lengths))]
    for s in make_segments(lengths, used, segment_tokens):
        document = max(b for b in begins if b <= s.begin)
        assert s.document_begin == document
        assert s.opens_document == (s.begin == document)


def test_a_short_document_is_one_short_segment() -> None:
    segments = make_segments([7, 1], 4, 128)
    assert [(s.begin, s.end, s.valid_end) for s in segments] == [(0, 1, 7), (1, 2, 65), (2, 4, 128)]
    assert [s.is_padding for s in segments] == [False, False, True]


def test_documents_that_do_not_fit_or_are_empty_are_refused() -> None:
    with pytest.raises(SparseRingError, match="take 3 blocks"):
        make_segments([64, 65], 2, None)
    with pytest.raises(SparseRingError, match="at least one token"):
        make_segments([3, 0], 2, None)
