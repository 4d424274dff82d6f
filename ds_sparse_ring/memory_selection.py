"""Bytes that choosing an index takes at its fullest, beside queries, keys and what is kept: counted from the code's own shapes.

C columns of all segments and patterns, each an int64; W *slots* of `select.every_query`, an int64 of 64 bits each.
"""

from __future__ import annotations

_INT64 = 8
_ROWS, _REPORT = 6, 13
"""int64 tensors ``[C]`` alive at once: where bits become rows, and where a logged step counts pairs (`index.density`)."""

_SLICE = 1 << 20
"""Slots that are unpacked, or exchanged, at a time."""
_UNPACKED = 128
"""Of a slot in such a slice: a byte a token, shifted, and masked."""


def every_query_bytes(columns: float, slots: float, keys: float, ranks: int) -> float:
    """Of `select.every_query.select_by_every_query`, on a ring of ``ranks``.

    Args:
        keys: bytes of the whole sequence's, which a ring gathers, and puts in order in a copy.
    """
    at_a_time = min(slots, _SLICE)
    gathered = 2 * keys if ranks > 1 else 0.0
    exchanged = 2 * ranks * at_a_time * _INT64 if ranks > 1 else 0.0
    unpacked = at_a_time * _UNPACKED + columns * _INT64
    return slots * _INT64 + max(gathered, exchanged, unpacked, columns * _ROWS * _INT64)


def report_bytes(columns: float) -> float:
    """Of the density in a logged step, of any selector."""
    return columns * _REPORT * _INT64
