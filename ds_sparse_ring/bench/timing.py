"""Seconds of functions that take turns, so that a machine which slows down slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one function over the rounds: median, fastest, slowest."""

    median_s: float
    fastest_s: float
    slowest_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """From the seconds of each round."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))


def alternate(functions: Sequence[Callable[[], Any]], rounds: int, device: torch.device, *, warm_up: int = 2) -> list[Timing]:
    """Time functions in turns, after ``warm_up`` rounds that are not timed.

    On CUDA the time between two events on the stream counts: what the device does, and gaps in which it waits for the host.
    """
    run = _cuda_round if device.type == "cuda" else _host_round
    for _ in range(warm_up):
        run(functions)
    seconds = [run(functions) for _ in range(rounds)]
    return [Timing.of(one) for one in zip(*seconds, strict=True)]


def _host_round(functions: Sequence[Callable[[], Any]]) -> list[float]:
    seconds = []
    for function in functions:
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _cuda_round(functions: Sequence[Callable[[], Any]]) -> list[float]:
    events = []
    torch.cuda.synchronize()
    for function in functions:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]
