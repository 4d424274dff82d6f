"""What checkpointed layers keep, outside the device: layer inputs and attention outputs, back before they are wanted.

The backward pass wants last what was kept first. So whenever something is taken, the copies back of what was kept before it
begin: they have the backward pass of a layer to hide behind. What nobody takes goes with the graph that owns it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ds_sparse_ring.config import OffloadConfig
from ds_sparse_ring.copies import Tier
from ds_sparse_ring.disk import PAGE_BYTES
from ds_sparse_ring.store import Store

_AHEAD = 2
"""Of what was kept before, how much comes back early: a layer's input and its attention output."""


class Spill:
    """The kept tensors of a rank, in host memory or, when that is full, on the disk.

    Args:
        timed: times waits for copies, as `Meter.timed`. ranks_on_host: of this machine, for the warning about its memory.
    """

    def __init__(
        self, config: OffloadConfig, timed: Callable[[str], AbstractContextManager[None]], ranks_on_host: int = 1
    ) -> None:
        self._config, self._timed, self._ranks_on_host = config, timed, ranks_on_host
        self._store: Store | None = None
        self._kept: list[weakref.ref[Spilled]] = []  # and not taken yet, in order
        self._lock = threading.Lock()
        self.numbers = itertools.count()

    def keep(self, tensors: Sequence[Tensor]) -> Spilled:
        """Copy tensors out of the device; they are kept as long as the object that is returned.

        Raises:
            SparseRingError: no room, naming what would help.
        """
        spilled = Spilled(self, len(tensors))
        for key, x in zip(spilled.keys, tensors, strict=True):
            self.put(key, x, owner=spilled)
        with self._lock:
            self._kept = [ref for ref in self._kept if ref() is not None]
            self._kept.append(weakref.ref(spilled))
        return spilled

    def put(self, key: int, x: Tensor, *, owner: object) -> None:
        """Copy one tensor out of the device under one of ``numbers``; nothing but its owner lets it go.

        Raises:
            SparseRingError: no room, naming what would help.
        """
        store = self._store_of(x)
        fits = store.room("host") >= x.numel() * x.element_size()
        tier: Tier = "host" if fits or self._config.disk_path is None else "disk"
        store.put(key, x, tier, owner=owner)

    def take(self, spilled: Spilled) -> list[Tensor]:
        """The tensors on the device, for the current stream."""
        tensors = [self.opened.get(key) for key in spilled.keys]
        with self._lock:
            waiting = [other for ref in self._kept if (other := ref()) is not None and other is not spilled]
            self._kept = [weakref.ref(other) for other in waiting]
        for other in reversed(waiting[-_AHEAD:]):
            for key in other.keys:
                self.opened.prefetch(key)
        return tensors

    def saved_tensors(self) -> saved_tensors_hooks:
        """Within it, what autograd saves is kept here: around a checkpointed layer, its inputs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @property
    def store(self) -> Store | None:
        """Where the tensors are; None before the first one."""
        return self._store

    @property
    def opened(self) -> Store:
        """Where the tensors are, once there is one."""
        assert self._store is not None
        return self._store

    def _pack(self, x: Tensor) -> Any:
        """Small tensors stay, and those of other devices."""
        if x.numel() * x.element_size() < PAGE_BYTES or (self._store is not None and x.device != self._store.device):
            return x.detach()
        return self.keep([x])

    def _unpack(self, packed: Any) -> Tensor:
        return self.take(packed)[0] if isinstance(packed, Spilled) else packed

    def _store_of(self, x: Tensor) -> Store:
        if self._store is None:
            self._store = Store.from_config(self._config, x.device, timed=self._timed, ranks_on_host=self._ranks_on_host)
        return self._store


class Spilled:
    """Tensors that were kept."""

    def __init__(self, spill: Spill, count: int) -> None:
        self._spill = spill
        self.keys = [next(spill.numbers) for _ in range(count)]

    def take(self) -> list[Tensor]:
        """`Spill.take`."""
        return self._spill.take(self)
