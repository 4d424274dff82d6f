"""Tensors by key that need not stay on the device: in pinned host memory, or on a disk.

``put`` copies a tensor out, ``prefetch`` starts to copy it back, ``get`` hands it over, ``drop`` forgets it. A caller that would
rather compute something again does not put it. Who uses it, and how:

* Checkpointed layers keep their inputs, attention outputs and log-sum-exps (`spill`): each is put with an ``owner`` that the
  graph holds, so that they go when the graph goes, after a failed step too. When one is taken, those before it are prefetched.
  ``room`` says when the host is full and the next one has to go to the disk.
* Keys and values of a layer (`pages`): put page by page; when page i is got, it is dropped, and page i + 1 is prefetched.

**Order.** Copies run on two streams, one for each direction; streams wait for them, and the host only for a disk. They are
ordered after what the calling thread's current stream has queued at ``put`` and ``prefetch``: prefetch before that work is queued
beside which the copy shall run. What is put has been made on the current stream, and is not written to afterwards; what ``get``
returns belongs to the stream on which it was prefetched, as if it had been made there. How device memory is bounded: see
`ds_sparse_ring.copies`.

**Host memory.** One slab, a free list; no allocation per tensor. Bytes are free as soon as their tensor is dropped, and the next
copy into them waits, on its stream, for the last one out of them: what fits never depends on how far the device has got.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.config import OffloadConfig
from ds_sparse_ring.copies import Copies, Copy, StoreNumbers, Tier, Timed
from ds_sparse_ring.disk import PAGE_BYTES, DiskFile
from ds_sparse_ring.disk_tier import DiskTier
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.pinned import SEGMENT_BYTES, HostBuffer, warn_if_short
from ds_sparse_ring.slab import FreeList, Regions
from ds_sparse_ring.streams import CudaStreams, PlainStreams, Streams
from ds_sparse_ring.units import GIB


@dataclass(eq=False)
class _Entry:
    """A kept tensor: where its bytes begin; event (host) or job (disk) of the copy that brought them; the last reader's event."""

    tier: Tier
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    serial: int
    tensor: Tensor | None = None  # of the device tier
    begin: int = 0
    arrived: Any = None
    read: Any = None
    fetched: Copy | None = None
    finalizer: Any = None


class Store:
    """Tensors of one device by key; see the module's text. Every method may be called from any thread."""

    def __init__(
        self,
        device: torch.device,
        host_bytes: int,
        *,
        disk: DiskFile | None = None,
        staging_bytes: int = 0,
        in_flight: int = 4,
        ranks_on_host: int = 1,
        timed: Timed = lambda name: nullcontext(),
        streams: Streams | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Reserve one slab of ``host_bytes + staging_bytes``.

        Args:
            host_bytes: budget of the host tier; a tensor takes whole pages of 4 KiB.
            disk: the disk tier's file; staging_bytes: pinned memory through which its tensors pass, at least the largest of
                them (twice that, and one is written while the next comes).
            in_flight: tensors at most that are held for copies while the host is ahead; their bytes are the price on the device.
            ranks_on_host: processes with such a store on this machine; for the warning about its memory.
            timed: times what it encloses on the current stream, like `Meter.timed`; encloses waits for copies ("copy_wait").
            streams: in place of those of the device. segment_bytes: how much is pinned at once, whole pages.

        Warns:
            UserWarning: the machine has less memory available than all ranks may pin.

        Raises:
            SparseRingError: the memory cannot be reserved.
        """
        self.device = torch.empty(0, device=device).device  # with its number
        cuda = self.device.type == "cuda"
        host_bytes, staging_bytes = (-(-nbytes // PAGE_BYTES) * PAGE_BYTES for nbytes in (host_bytes, staging_bytes))
        total_bytes = host_bytes + staging_bytes
        warn_if_short(total_bytes, ranks_on_host)
        if streams is None:
            streams = CudaStreams(self.device) if cuda else PlainStreams()
        self._memory = HostBuffer(total_bytes, pin=cuda, segment_bytes=segment_bytes)
        self._numbers = StoreNumbers()
        self._copies = Copies(self._memory, streams, self._numbers, in_flight, timed)
        self._host = Regions(FreeList(0, host_bytes, PAGE_BYTES), self._copies.passed)
        self._disk = DiskTier(disk, self._copies, host_bytes, total_bytes) if disk is not None else None
        self._entries: dict[Hashable, _Entry] = {}
        self._orphans: deque[tuple[Hashable, int]] = deque()  # filled by the garbage collector, at any time in any thread
        self._serials = itertools.count()
        self._lock = threading.Lock()

    @classmethod
    def from_config(cls, config: OffloadConfig, device: torch.device, **options: Any) -> Store:
        """From the ``"offload"`` part of the section; ``options`` as for the constructor.

        Raises:
            SparseRingError: memory or room on the disk that cannot be had, or no op for asynchronous I/O.
        """
        disk = None
        if config.disk_path is not None and config.disk_gib is not None:
            disk = DiskFile(config.disk_path, int(config.disk_gib * GIB))
        staging_bytes = int(config.staging_gib * GIB) if disk is not None else 0
        return cls(device, int(config.host_gib * GIB), disk=disk, staging_bytes=staging_bytes, **options)

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            self._drop_orphans()
            return key in self._entries

    def room(self, tier: Tier) -> float:
        """Bytes of the largest tensor that ``put`` takes now; infinite on the device."""
        with self._lock:
            self._drop_orphans()
            if tier == "disk":
                return min(self._disk.pieces.largest, self._disk.staging.size) if self._disk is not None else 0
            return self._host.pieces.largest if tier == "host" else float("inf")

    def put(self, key: Hashable, x: Tensor, tier: Tier = "host", *, owner: object = None) -> None:
        """Keep ``x`` (any shape, dtype and strides; detached) under a new key.

        Args:
            owner: an object with whose death the tensor is dropped.

        Raises:
            SparseRingError: the key is taken, x is not on the store's device, or the tier has no room for it.
        """
        if x.device != self.device:
            raise SparseRingError(f"store: {key!r} is on {x.device}, but the store keeps tensors of {self.device}")
        x = x.detach()
        stride = torch.empty_like(x, device="meta").stride()  # x's own, unless it has gaps or overlaps
        if tier != "device" and x.stride() != stride:
            x = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
        with self._lock:
            self._settle()
            if key in self._entries:
                raise SparseRingError(f"store: {key!r} was put twice: drop it first")
            entry = _Entry(tier, x.shape, stride, x.dtype, x.numel() * x.element_size(), next(self._serials))
            if tier == "device":
                entry.tensor = x
                self._numbers.count("device", entry.nbytes)
            elif tier == "host":
                self._put_host(key, entry, x)
            else:
                self._put_disk(key, entry, x)
            self._entries[key] = entry
            if owner is not None:
                entry.finalizer = weakref.finalize(owner, self._orphans.append, (key, entry.serial))

    def prefetch(self, key: Hashable) -> None:
        """Start to copy a tensor into a buffer on the device; nothing to do for one that is there or under way.

        Raises:
            SparseRingError: no such key, or a disk that failed.
        """
        with self._lock:
            self._settle()
            self._prefetch(self._entry(key))

    def get(self, key: Hashable) -> Tensor:
        """The tensor, for the current stream: equal bits and strides in a new buffer, or the very tensor of the device tier.

        It stays in the store; a second call copies it again.

        Raises:
            SparseRingError: no such key, or a disk that failed.
        """
        with self._lock:
            self._settle()
            entry = self._entry(key)
            if entry.tensor is not None:
                return entry.tensor
            self._prefetch(entry)
            fetched, entry.fetched = entry.fetched, None
            assert fetched is not None
            self._numbers.count("device", -entry.nbytes)
            return self._copies.await_buffer(fetched)

    def drop(self, key: Hashable) -> None:
        """Forget a tensor and free its bytes; copies under way end in peace.

        Raises:
            SparseRingError: no such key.
        """
        with self._lock:
            self._entry(key)
            self._drop(key)

    def clear(self) -> None:
        """Drop everything and forget errors of a disk: after a step that failed, for what has no owner."""
        with self._lock:
            for key in list(self._entries):
                self._drop(key)
            self._copies.let_go(0)
            if self._disk is not None:
                self._disk.settle()
                self._disk.forget_failure()

    def close(self) -> None:
        """Drop everything, wait for what is under way, and give memory and disk back. The store is of no use afterwards."""
        self.clear()
        if self._disk is not None:
            self._disk.close()
        streams = self._copies.streams
        for stream in (streams.to_host, streams.to_device):
            streams.block(streams.record(stream))
        self._memory.close()

    def numbers(self) -> StoreNumbers:
        """Bytes held and moved so far."""
        with self._lock:
            self._numbers.pinned_bytes = self._memory.pinned_bytes
            return copy.deepcopy(self._numbers)

    # Everything below runs with the lock held.

    def _entry(self, key: Hashable) -> _Entry:
        if key not in self._entries:
            raise SparseRingError(f"store: there is no {key!r}: it was never put, or dropped already, by its owner's end perhaps")
        return self._entries[key]

    def _put_host(self, key: Hashable, entry: _Entry, x: Tensor) -> None:
        taken = self._host.take(entry.nbytes)
        if taken is None:
            way_out = "raise sparse_ring.offload.host_gib, keep fewer layers, use smaller chunks, or add disk_path and disk_gib"
            raise SparseRingError(_full("host", key, entry.nbytes, self._host.pieces, way_out))
        entry.begin, fences = taken
        try:
            self._memory.ready(entry.begin, entry.begin + entry.nbytes)
        except SparseRingError:
            self._host.give(entry.begin)
            raise
        entry.arrived = self._copies.to_host(x, entry.begin, fences)
        self._numbers.count("host", self._host.pieces.padded(entry.nbytes))

    def _put_disk(self, key: Hashable, entry: _Entry, x: Tensor) -> None:
        disk = self._disk
        if disk is None:
            raise SparseRingError(
                f"store: {key!r} is to go to the disk, but there is none: set sparse_ring.offload.disk_path and disk_gib"
            )
        if (size := disk.pieces.padded(entry.nbytes)) > disk.staging.size:
            raise SparseRingError(
                f"store: {key!r} of {_size(size)} is to go to the disk through {_size(disk.staging.size)} of staging memory: "
                "raise sparse_ring.offload.staging_gib to twice the largest tensor, or put smaller pieces"
            )
        if size > disk.pieces.largest:
            way_out = "raise sparse_ring.offload.disk_gib, or keep fewer layers"
            raise SparseRingError(_full("disk", key, size, disk.pieces, way_out))
        entry.begin, entry.arrived = disk.put(x)

    def _prefetch(self, entry: _Entry) -> None:
        if entry.tensor is not None or entry.fetched is not None:
            return
        streams = self._copies.streams
        here, buffer = streams.current(), streams.empty(entry.shape, entry.stride, entry.dtype)
        usable = streams.record(here)  # whoever had the buffer's memory before is done with it by then
        if entry.tier == "host":
            done = entry.read = self._copies.to_device(buffer, entry.begin, [usable, entry.arrived])
        else:
            assert self._disk is not None
            done = self._disk.fetch(entry.begin, entry.arrived, buffer, usable)
        entry.fetched = Copy(buffer, here, done)
        self._numbers.count("device", entry.nbytes)
        self._numbers.to_device += 1
        self._numbers.to_device_bytes += entry.nbytes

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        if entry.finalizer is not None:
            entry.finalizer.detach()
        if entry.fetched is not None:
            self._numbers.count("device", -entry.nbytes)
            self._copies.hold(entry.fetched)
        if entry.tier == "device":
            self._numbers.count("device", -entry.nbytes)
        elif entry.tier == "host":  # copies to the host are in order, so only one to the device may be late
            self._numbers.count("host", -self._host.give(entry.begin, entry.read))
        elif self._disk is not None:
            self._disk.drop(entry.begin)

    def _settle(self) -> None:
        """What calls begin with: a look, without waiting, at what has ended since the last one."""
        self._drop_orphans()
        self._copies.let_go()
        if self._disk is not None:
            self._disk.settle()
            self._disk.check()

    def _drop_orphans(self) -> None:
        while self._orphans:
            key, serial = self._orphans.popleft()
            if key in self._entries and self._entries[key].serial == serial:
                self._drop(key)


def _full(tier: str, key: Hashable, nbytes: int, pieces: FreeList, way_out: str) -> str:
    free = pieces.size - pieces.used
    return (
        f"store: {key!r} needs {_size(nbytes)} of the {tier} tier's {_size(pieces.size)}, of which {_size(free)} are free, the "
        f"largest piece {_size(pieces.largest)}: {way_out}"
    )


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / GIB:.2f} GiB)"
