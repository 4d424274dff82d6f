"""Streams without a GPU that do their work late, and in any order that events allow: what is ordered by luck alone goes wrong.

Memory behaves as that of PyTorch's allocator for CUDA: it is free for its stream as soon as the last tensor dies, and the next
tensor of its size gets it, while work that is queued may still use it. Freed memory is overwritten by its stream.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Event:
    """Passes when the stream that it was recorded on gets there."""

    def __init__(self) -> None:
        self.passed = False


class Stream:
    """Work in order; an event in it is waited for."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None] | Event] = deque()


class DeferredStreams:
    """For `Store`: the device's memory is the host's, and nothing is done until `advance` or `block`.

    Attributes:
        compute: two streams for work. here: the one that is current.
    """

    def __init__(self, seed: int) -> None:
        self.compute = [Stream(), Stream()]
        self.here = self.compute[0]
        self.to_host: Any = Stream()
        self.to_device: Any = Stream()
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._free: dict[tuple[Stream, int], list[np.ndarray]] = {}
        self._memory: dict[int, np.ndarray] = {}
        self._sharing: dict[int, list[Stream]] = {}

    def current(self) -> Any:
        return self.here

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = max(1, shape.numel()) * dtype.itemsize
        with self._lock:
            stream, free = self.here, self._free.setdefault((self.here, nbytes), [])
            memory = free.pop() if free else np.zeros(nbytes, np.uint8)
            self._memory[memory.ctypes.data] = memory
        alive = memory.view()
        weakref.finalize(alive, self._freed, stream, memory)
        return torch.from_numpy(alive).view(dtype).as_strided(shape, stride)

    def memory(self, x: Tensor) -> np.ndarray:
        """The bytes below a tensor, which outlive it."""
        return self._memory[x.data_ptr()]

    def queue(self, stream: Any, work: Callable[[], None] | Event) -> None:
        """Work to do on a stream, or an event to wait for."""
        with self._lock:
            stream.queue.append(work)

    def record(self, stream: Any) -> Any:
        event = Event()
        self.queue(stream, lambda: setattr(event, "passed", True))
        return event

    def wait(self, stream: Any, event: Any) -> None:
        self.queue(stream, event)

    def passed(self, event: Any) -> bool:
        return bool(event.passed)

    def block(self, event: Any) -> None:
        while not event.passed:
            if not self.advance(1):
                time.sleep(1e-4)

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        # through numpy: the queue holds no tensor, so that only the store keeps memory from being freed
        to, what = (np.asarray(_bytes_at(x)) for x in (target, source))
        self.queue(stream, lambda: np.copyto(to, what))

    def share(self, x: Tensor, stream: Any) -> None:
        self._sharing.setdefault(x.data_ptr(), []).append(stream)

    def advance(self, steps: int) -> int:
        """Do so many pieces of work at most, each on any stream that need not wait; returns how many."""
        for done in range(steps):
            with self._lock:
                ready = [s for s in (*self.compute, self.to_host, self.to_device) if s.queue and self._may_run(s.queue[0])]
                if not ready:
                    return done
                work = self._random.choice(ready).queue.popleft()
                if not isinstance(work, Event):
                    work()
        return steps

    def _may_run(self, work: Callable[[], None] | Event) -> bool:
        return work.passed if isinstance(work, Event) else True

    def _freed(self, stream: Stream, memory: np.ndarray) -> None:
        with self._lock:
            for other in self._sharing.pop(memory.ctypes.data, []):
                self.wait(stream, self.record(other))
            self.queue(stream, lambda: memory.fill(0xAB))
            self._free[stream, len(memory)].append(memory)


def _bytes_at(x: Tensor) -> Any:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * x.numel()).from_address(x.data_ptr()))
