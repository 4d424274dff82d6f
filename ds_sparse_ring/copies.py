"""Copies between a slab of host memory and the device: queued on streams of their own, with what they touch kept alive.

All waiting is done by streams. Copies are ordered after what the calling thread's current stream has queued before.

What a copy reads is held until its event has passed, which is looked up without waiting. Beyond ``in_flight`` tensors the oldest
is let go at once, and the stream whose memory it is waits for its copy: so the memory of a few tensors at most is kept from being
used again. `Tensor.record_stream` would bound nothing while the host runs ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.pinned import HostBuffer
from ds_sparse_ring.streams import Streams

Tier = Literal["device", "host", "disk"]
Timed = Callable[[str], AbstractContextManager[Any]]


@dataclass
class StoreNumbers:
    """What a store has done so far.

    Attributes:
        bytes_now, bytes_peak: per tier. ``device`` is what the store itself keeps alive there: tensors of that tier, buffers
            prefetched and not yet got, and tensors whose copy is under way; ``host`` counts staging of the disk, too.
        pinned_bytes: host memory that is pinned by now.
        to_host_bytes, to_device_bytes, written_bytes, read_bytes: bytes moved, each way.
        to_host, to_device: tensors moved.
    """

    bytes_now: dict[Tier, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    bytes_peak: dict[Tier, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    pinned_bytes: int = 0
    to_host_bytes: int = 0
    to_device_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    to_host: int = 0
    to_device: int = 0

    def count(self, tier: Tier, nbytes: int) -> None:
        """Add to what a tier holds."""
        self.bytes_now[tier] += nbytes
        self.bytes_peak[tier] = max(self.bytes_peak[tier], self.bytes_now[tier])


@dataclass
class Copy:
    """A copy out of or into ``x`` on the device, whose memory is the stream's; ``done``: its event, or a job that returns it."""

    x: Tensor
    stream: Any
    done: Any


class Copies:
    """Queues copies; not for several threads at once, but for `to_device`."""

    def __init__(self, memory: HostBuffer, streams: Streams, numbers: StoreNumbers, in_flight: int, timed: Timed) -> None:
        self.memory, self.streams, self.numbers = memory, streams, numbers
        self._in_flight, self._timed = in_flight, timed
        self._held: deque[Copy] = deque()

    def to_host(self, x: Tensor, begin: int, fences: list[Any]) -> Any:
        """Copy a tensor without gaps into the slab, after the events ``fences``; returns the copy's event."""
        streams, here = self.streams, self.streams.current()
        for event in (streams.record(here), *fences):
            streams.wait(streams.to_host, event)
        for host, device in self._pairs(x, begin):
            streams.copy(streams.to_host, host, device)
        done = streams.record(streams.to_host)
        self.hold(Copy(x, here, done))
        self.numbers.to_host += 1
        self.numbers.to_host_bytes += x.numel() * x.element_size()
        return done

    def to_device(self, buffer: Tensor, begin: int, fences: list[Any]) -> Any:
        """Copy from the slab into a buffer without gaps, after the events ``fences``; returns the copy's event."""
        streams = self.streams
        for event in fences:
            streams.wait(streams.to_device, event)
        for host, device in self._pairs(buffer, begin):
            streams.copy(streams.to_device, device, host)
        return streams.record(streams.to_device)

    def await_buffer(self, copy: Copy) -> Tensor:
        """The buffer of a copy to the device, for the current stream, which waits for it.

        Raises:
            SparseRingError: the disk's job failed.
        """
        here = self.streams.current()
        if (failure := self._wait(here, copy.done)) is not None:
            raise SparseRingError(f"store: a tensor could not be read back from the disk: {failure}") from failure
        if here != copy.stream:
            self.streams.share(copy.x, here)
        return copy.x

    def hold(self, copy: Copy) -> None:
        """Keep a copy's tensor alive until it is done."""
        self._held.append(copy)
        self.numbers.count("device", copy.x.numel() * copy.x.element_size())
        self.let_go(self._in_flight)

    def let_go(self, most: int | None = None) -> None:
        """Release tensors whose copies are done; of the others keep ``most``, and let streams wait for the oldest."""
        most = self._in_flight if most is None else most
        while self._held and (len(self._held) > most or self.passed(self._held[0].done)):
            copy = self._held.popleft()
            self.numbers.count("device", -copy.x.numel() * copy.x.element_size())
            if not self.passed(copy.done):
                self._wait(copy.stream, copy.done)

    def passed(self, done: Any) -> bool:
        """Whether a copy is done: its event has passed, or its job failed."""
        if isinstance(done, Future):
            return done.done() and (done.exception() is not None or self.passed(done.result()))
        return done is None or self.streams.passed(done)

    def _wait(self, stream: Any, done: Any) -> BaseException | None:
        """Let a stream wait for a copy, and the host for a disk; returns the failure of a disk's job."""
        with self._timed("copy_wait"):
            if isinstance(done, Future):
                if (failure := done.exception()) is not None:
                    return failure
                done = done.result()
            self.streams.wait(stream, done)
        return None

    def _pairs(self, x: Tensor, begin: int) -> list[tuple[Tensor, Tensor]]:
        """The slab's bytes and the tensor's, in pieces to copy."""
        nbytes = x.numel() * x.element_size()
        flat = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
        pieces = self.memory.pieces(begin, begin + nbytes) if nbytes else []
        return [(self.memory.bytes[low:high], flat[low - begin : high - begin]) for low, high in pieces]
