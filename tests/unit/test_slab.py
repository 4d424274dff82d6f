"""The free list of a store's memory."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ds_sparse_ring.slab import FreeList, Regions

UNIT = 4096
SIZES = st.integers(0, 6 * UNIT)
STEPS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1000)), max_size=120)


@given(STEPS, st.integers(0, 40), st.sampled_from([0, UNIT, 3 * UNIT]))
def test_pieces_never_overlap_and_are_refused_only_when_no_gap_is_large_enough(
    steps: list[tuple[bool, int, int]], units: int, first: int
) -> None:
    pieces = FreeList(first, first + units * UNIT + 17, UNIT)
    live: dict[int, int] = {}
    for take, size, which in steps:
        gaps = _gaps(live, first, first + units * UNIT)
        assert pieces.largest == max(gaps, default=0)
        assert pieces.size - pieces.used == sum(gaps)
        if take:
            begin = pieces.take(size)
            padded = max(UNIT, -(-size // UNIT) * UNIT)
            assert padded == pieces.padded(size)
            assert (begin is None) == (padded > max(gaps, default=0))
            if begin is not None:
                assert (begin - first) % UNIT == 0
                live[begin] = begin + padded
                _gaps(live, first, first + units * UNIT)
        elif live:
            begin = sorted(live)[which % len(live)]
            assert pieces.give(begin) == live.pop(begin)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 1000)), max_size=300))
def test_fragmentation_is_bounded(steps: list[tuple[int, int]]) -> None:
    """Knuth, exercise 2.5-43: with n units alive in tensors of at most m, n H(m) / ln 2 units are enough."""
    most, alive = 8, 24
    pieces = FreeList(0, math.ceil(alive * sum(1 / i for i in range(1, most + 1)) / math.log(2)) * UNIT, UNIT)
    live: list[tuple[int, int]] = []
    for size, which in steps:
        while sum(units for _, units in live) + size > alive:
            pieces.give(live.pop(which % len(live))[0])
        begin = pieces.take(size * UNIT)
        assert begin is not None
        live.append((begin, size))


@given(st.lists(st.integers(1, 9 * UNIT), min_size=1, max_size=30))
def test_layers_that_come_and_go_in_opposite_orders_need_no_more_than_their_sum(sizes: list[int]) -> None:
    pieces = FreeList(0, sum(-(-size // UNIT) * UNIT for size in sizes), UNIT)
    for _ in range(3):
        begins = [pieces.take(size) for size in sizes]
        assert None not in begins and pieces.largest == 0
        for begin in reversed(begins):
            assert begin is not None
            pieces.give(begin)
        assert pieces.largest == pieces.size


@given(st.lists(st.integers(0, 1000), max_size=100))
def test_chunks_of_one_size_never_fragment(order: list[int]) -> None:
    pieces = FreeList(0, 10 * 3 * UNIT, UNIT)
    live = [pieces.take(3 * UNIT) for _ in range(10)]
    for which in order:
        begin = live.pop(which % 10)
        assert begin is not None
        pieces.give(begin)
        live.append(pieces.take(3 * UNIT))
    assert None not in live


def test_who_takes_bytes_again_learns_of_their_last_readers() -> None:
    passed: set[str] = set()
    regions = Regions(FreeList(0, 4 * UNIT, UNIT), passed.__contains__)
    begins = [taken[0] for taken in (regions.take(UNIT) for _ in range(4)) if taken is not None]
    assert regions.take(1) is None
    for begin, fence in zip(begins, ["a", "b", "c", None], strict=True):
        assert regions.give(begin, fence) == UNIT
    assert regions.take(UNIT) == (0, ["a"])
    passed.add("b")
    assert regions.take(3 * UNIT) == (UNIT, ["c"])


def _gaps(live: dict[int, int], first: int, last: int) -> list[int]:
    """Bytes between the live pieces, which must not overlap."""
    gaps, at = [], first
    for begin, end in sorted(live.items()):
        assert begin >= at and end <= last
        gaps.append(begin - at)
        at = end
    return [gap for gap in [*gaps, last - at] if gap]
