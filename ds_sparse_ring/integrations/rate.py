"""Tokens per second, as both training scripts report it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class TokenRate:
    """Counts tokens over wall time; evaluation and checkpoints can be left out of it."""

    def __init__(self) -> None:
        self._tokens = 0
        self._begin_s = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count tokens of the batch as the data has them: before sharding, without padding."""
        self._tokens += tokens

    def pop(self) -> tuple[int, float]:
        """Tokens and seconds since the last call."""
        now_s = time.perf_counter()
        tokens, seconds = self._tokens, max(now_s - self._begin_s, 1e-9)
        self._tokens, self._begin_s = 0, now_s
        return tokens, seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._begin_s += time.perf_counter() - begin_s
