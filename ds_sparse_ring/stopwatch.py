"""Times of parts of the work, taken where the work runs without waiting for it: events on a GPU's stream, a clock on a CPU."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

_PENDING = 4096
"""Spans that are kept until someone reads them; of more, the oldest is read, which the device passed long ago."""

Key = TypeVar("Key", bound=Hashable)


class Stopwatch(Generic[Key]):
    """Seconds by key.

    Attributes:
        own_s: host seconds that taking the times took so far.
    """

    def __init__(self) -> None:
        self.own_s = 0.0
        self._pending: deque[tuple[Key, Any, Any]] = deque()
        self._seconds: defaultdict[Key, float] = defaultdict(float)

    @contextmanager
    def timed(self, key: Key) -> Iterator[None]:
        """Time what is launched inside: on a GPU from the moment the stream gets there to the moment it has passed."""
        begin = self._now()
        yield
        self._pending.append((key, begin, self._now()))
        if len(self._pending) > _PENDING:
            self._read_oldest()

    def pop(self) -> dict[Key, float]:
        """Seconds by key since the last call; the host waits for the device."""
        while self._pending:
            self._read_oldest()
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def _read_oldest(self) -> None:
        begin_s = time.perf_counter()
        key, begin, end = self._pending.popleft()
        if isinstance(begin, float):
            self._seconds[key] += end - begin
        else:
            end.synchronize()
            self._seconds[key] += begin.elapsed_time(end) / 1e3
        self.own_s += time.perf_counter() - begin_s

    def _now(self) -> Any:
        now_s = time.perf_counter()
        if not torch.cuda.is_initialized():  # a run on the CPU, whatever the machine has
            return now_s
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.own_s += time.perf_counter() - now_s
        return event
