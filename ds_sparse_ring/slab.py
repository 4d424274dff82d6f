"""Which bytes of one large memory are free: pure integers.

First fit by address, because its worst case is bounded: tensors of at most m units, n units of them at a time, never need more
than n (1 + 1/2 + ... + 1/m) / ln 2 units, while best fit may need almost n m (Robson; Knuth, The Art of Computer Programming 1,
exercises 2.5-42 and 43). Tensors of one size, and tensors that go in the opposite order of their coming, as those of layers do,
need n alone. First fit also keeps to low addresses: memory that is pinned when first used is pinned up to the high-water mark.

What fits depends on the order of the calls alone, never on how far a device has got: a step that ran once runs again.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from typing import Any


class FreeList:
    """Pieces of the bytes ``begin`` to ``end``; each begins and ends at a multiple of ``alignment`` from ``begin``."""

    def __init__(self, begin: int, end: int, alignment: int = 4096) -> None:
        self.alignment = alignment
        end = begin + (end - begin) // alignment * alignment
        self.size, self.used = end - begin, 0
        self._free = [(begin, end)] if end > begin else []  # by address, never two that touch
        self._taken: dict[int, int] = {}

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        return max((end - begin for begin, end in self._free), default=0)

    def padded(self, size: int) -> int:
        """Bytes that a piece for ``size`` bytes occupies; at least one unit."""
        return max(1, -(-size // self.alignment)) * self.alignment

    def take(self, size: int) -> int | None:
        """Where a piece of ``size`` bytes begins from now on; None if no free piece is large enough."""
        size = self.padded(size)
        for i, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[i : i + 1] = [(begin + size, end)] if end - begin > size else []
                self._taken[begin] = begin + size
                self.used += size
                return begin
        return None

    def give(self, begin: int) -> int:
        """Free the piece that begins there; returns its end. It becomes one with its free neighbours."""
        piece_end = end = self._taken.pop(begin)
        self.used -= end - begin
        i = bisect(self._free, (begin, end))
        low, high = i, i
        if i < len(self._free) and self._free[i][0] == end:
            end, high = self._free[i][1], i + 1
        if i > 0 and self._free[i - 1][1] == begin:
            begin, low = self._free[i - 1][0], i - 1
        self._free[low:high] = [(begin, end)]
        return piece_end


class Regions:
    """A free list whose pieces may be taken again while their last reader is still at work.

    Whoever gives a piece back names a *fence* (an event, a job) that the next user of any of its bytes has to wait for; ``take``
    hands over those that have not passed yet. So nothing waits here, and nothing is refused that will be free in a moment.
    """

    def __init__(self, pieces: FreeList, passed: Callable[[Any], bool]) -> None:
        self.pieces, self._passed = pieces, passed
        self._fences: list[tuple[int, int, Any]] = []

    def take(self, size: int) -> tuple[int, list[Any]] | None:
        """Where the piece begins, and the fences to wait for before it is written; None if there is no room."""
        begin = self.pieces.take(size)
        if begin is None:
            return None
        end = begin + self.pieces.padded(size)
        self._fences = [entry for entry in self._fences if not self._passed(entry[2])]
        return begin, [fence for low, high, fence in self._fences if low < end and high > begin]

    def give(self, begin: int, fence: Any = None) -> int:
        """Free a piece; ``fence`` passes when it may be written again, None is at once. Returns its bytes."""
        end = self.pieces.give(begin)
        if fence is not None:
            self._fences.append((begin, end, fence))
        return end - begin
