"""Streams and events for copies between a device and the host; on a CPU they are nothing, and a copy is done when it returns.

An *event* is what `record` returns. `wait` makes a stream wait, never the host; only `block` stops the thread that calls it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Streams(Protocol):
    """What a store needs of a device.

    Attributes:
        to_host, to_device: the two streams for copies: the directions run at full speed beside each other.
    """

    to_host: Any
    to_device: Any

    def current(self) -> Any:
        """The stream on which the calling thread queues its work."""

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the device, for the current stream."""

    def record(self, stream: Any) -> Any:
        """An event that passes when all that is queued on the stream by now is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on the stream from now on starts after the event."""

    def passed(self, event: Any) -> bool:
        """Whether the event has passed; does not wait."""

    def block(self, event: Any) -> None:
        """Return when the event has passed."""

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        """Queue a copy; both tensors must live until it is done."""

    def share(self, x: Tensor, stream: Any) -> None:
        """``stream`` uses memory of another stream: it is not used again before what is queued when ``x`` dies is done."""


class PlainStreams:
    """For the CPU."""

    to_host: Any = None
    to_device: Any = None

    def current(self) -> Any:
        return None

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype)

    def record(self, stream: Any) -> Any:
        return None

    def wait(self, stream: Any, event: Any) -> None:
        pass

    def passed(self, event: Any) -> bool:
        return True

    def block(self, event: Any) -> None:
        pass

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def share(self, x: Tensor, stream: Any) -> None:
        pass


class CudaStreams:
    """For one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.to_host: Any = torch.cuda.Stream(device)
        self.to_device: Any = torch.cuda.Stream(device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def empty(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)

    def record(self, stream: Any) -> Any:
        event = torch.cuda.Event(blocking=True)  # a disk's thread that waits for it sleeps
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def block(self, event: Any) -> None:
        event.synchronize()

    def copy(self, stream: Any, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def share(self, x: Tensor, stream: Any) -> None:
        x.record_stream(stream)


class HostCopy:
    """A small tensor on its way to the host, which does other things meanwhile.

    It passes through pinned memory: a copy from a device to other memory is staged and takes longer, and the host waits for it.
    """

    def __init__(self, x: Tensor) -> None:
        self._x = x
        self._arrived: torch.cuda.Event | None = None
        if x.is_cuda:
            self._x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(x.device))

    def get(self) -> Tensor:
        """The tensor on the host, which waits for it the first time, and not for what was queued after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._x


class HostNumber:
    """`HostCopy` of an integer, from a tensor of one element."""

    def __init__(self, x: Tensor) -> None:
        self._number: HostCopy | int = HostCopy(x)

    def get(self) -> int:
        """The number; see `HostCopy.get`."""
        if isinstance(self._number, HostCopy):
            self._number = int(self._number.get())
        return self._number
