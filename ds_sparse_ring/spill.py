"""What checkpointed layers keep: layer inputs and attention outputs, each where the ladder puts it, back before it is wanted.

The backward pass wants last what was kept first. So whenever something is taken, the copies back of what was kept before it
begin: they have the backward pass of a layer to hide behind. Each forward pass keeps for itself (`Graph`): of two that wait for
their backward pass, neither fetches for the other. What nobody takes goes with the graph that owns it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ds_sparse_ring.config import OffloadConfig
from ds_sparse_ring.copies import Tier
from ds_sparse_ring.disk import PAGE_BYTES
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.ladder import TIERS, UNIT_BYTES, Budgets, Ladder, Place, padded
from ds_sparse_ring.store import Store

_OUTSIDE: tuple[Tier, ...] = ("host", "disk")
_AHEAD = 2
"""Of what was kept before, how much comes back early: a layer's input and its attention output."""


class Spill:
    """The kept tensors of a rank.

    Args:
        timed: times waits for copies, as `Meter.timed`. ranks_on_host: of this machine, for the warning about its memory.
    """

    def __init__(
        self, config: OffloadConfig, timed: Callable[[str], AbstractContextManager[None]], ranks_on_host: int = 1
    ) -> None:
        self.budgets = Budgets.of(config)
        self._config, self._timed, self._ranks_on_host = config, timed, ranks_on_host
        self._store: Store | None = None
        self._on_device: list[weakref.ref[Spilled]] = []
        self._lock = threading.Lock()
        self.numbers = itertools.count()

    def graph(self, ladder: Ladder | None = None) -> Graph:
        """For one forward pass and its backward pass; without a ladder, in host memory first."""
        return Graph(self, ladder)

    @property
    def store(self) -> Store | None:
        """Where the tensors outside the device are; None before the first one."""
        return self._store

    def open(self, device: torch.device) -> Store:
        """The same, made if there is none: its memory and file are reserved, and DeepSpeed's op for the disk is built.

        Raises:
            SparseRingError: memory or room on the disk that cannot be had, or no op for asynchronous I/O.
        """
        if self._store is None:
            self._store = Store.from_config(self._config, device, timed=self._timed, ranks_on_host=self._ranks_on_host)
        return self._store

    @property
    def opened(self) -> Store:
        """Where the tensors outside the device are, once there is one."""
        assert self._store is not None
        return self._store

    def keep(self, tensors: Sequence[Tensor], place: Place, graph: Graph) -> Spilled | None:
        """Keep tensors together at ``place`` or, as when an earlier pass still waits for its backward pass, where room is.

        None: there is none.
        """
        nbytes = sum(padded(x.numel() * x.element_size()) for x in tensors)
        first = TIERS.index(place)
        for tier in (*TIERS[first:], *reversed(TIERS[:first])):
            kept = self._hold(tensors, graph, nbytes) if tier == "device" else self._put(tensors, tier, graph, nbytes)
            if kept is not None:
                return kept
        return None

    def put(self, key: int, x: Tensor, *, owner: object) -> None:
        """Copy one tensor out of the device under one of ``numbers``; nothing but its owner lets it go.

        Raises:
            SparseRingError: no room, naming what would help.
        """
        store = self.open(x.device)
        fits = store.room("host") >= x.numel() * x.element_size()
        store.put(key, x, "host" if fits or not self.budgets.disk else "disk", owner=owner)

    def fetch(self, spilled: Spilled) -> list[Tensor]:
        """The tensors on the device, for the current stream."""
        return [self.opened.get(key) for key in spilled.keys] or spilled.tensors

    def prefetch(self, spilled: Spilled) -> None:
        """Begin to copy them back."""
        for key in spilled.keys:
            self.opened.prefetch(key)

    def stays(self, x: Tensor) -> bool:
        """Whether autograd keeps a tensor itself: small ones, and those of other devices."""
        return x.numel() * x.element_size() < PAGE_BYTES or (self._store is not None and x.device != self._store.device)

    def full(self, x: Tensor) -> SparseRingError:
        """The error for a layer's input that has no room anywhere."""
        nbytes = x.numel() * x.element_size()
        room = ", ".join(f"{self._store.room(tier):.0f} bytes ({tier})" for tier in _OUTSIDE) if self._store else "nothing"
        return SparseRingError(
            f"sparse_ring.offload: a layer's input needs {nbytes} bytes, and the largest free pieces are {room}: run the "
            "backward pass of one forward pass before the next forward pass, whose layers keep as much again; or raise "
            "host_gib, or add disk_path and disk_gib"
        )

    def _hold(self, tensors: Sequence[Tensor], graph: Graph, nbytes: int) -> Spilled | None:
        """On the device, if its budget has room."""
        with self._lock:
            held = [spilled for ref in self._on_device if (spilled := ref()) is not None]
            if sum(spilled.nbytes for spilled in held) + nbytes > self.budgets.device:
                return None
            spilled = Spilled(graph, nbytes, [x.detach() for x in tensors])
            self._on_device = [weakref.ref(other) for other in (*held, spilled)]
            return spilled

    def _put(self, tensors: Sequence[Tensor], tier: Any, graph: Graph, nbytes: int) -> Spilled | None:
        """In the store, if the tier has a piece for all of them, more than they need."""
        if not self.budgets.room(tier, nbytes):
            return None
        store = self.open(tensors[0].device)
        alignment = UNIT_BYTES if tier == "disk" else PAGE_BYTES
        if store.room(tier) < sum(padded(x.numel() * x.element_size(), alignment) for x in tensors):
            return None
        spilled = Spilled(graph, nbytes, [])
        for x in tensors:
            store.put(key := next(self.numbers), x, tier, owner=spilled)
            spilled.keys.append(key)
        return spilled


class Graph:
    """What the layers of one forward pass keep in a rank's ``spill``, in order."""

    def __init__(self, spill: Spill, ladder: Ladder | None) -> None:
        self.spill, self._ladder = spill, ladder
        self._kept: list[weakref.ref[Spilled]] = []  # and not taken yet
        self._lock = threading.Lock()
        self._layers = itertools.count()

    def keep_output(self, layer: int, tensors: Sequence[Tensor]) -> Spilled | None:
        """Keep attention's output and log-sum-exp (detached) as long as the object that is returned.

        None: there is no room for them, in the ladder or now; the replay attends again.
        """
        place: Place = "host" if self._ladder is None else self._ladder.outputs[min(layer, len(self._ladder.outputs) - 1)]
        return None if place == "recompute" else self._remember(self.spill.keep(tensors, place, self))

    def keep_input(self, layer: int, x: Tensor) -> Spilled:
        """Keep a layer's input as long as the object that is returned.

        Raises:
            SparseRingError: no room, naming what would help.
        """
        place: Place = "host" if self._ladder is None else self._ladder.inputs[min(layer, len(self._ladder.inputs) - 1)]
        kept = self._remember(self.spill.keep([x], place, self))
        if kept is None:
            raise self.spill.full(x)
        return kept

    def take(self, spilled: Spilled, *, last: bool = True) -> list[Tensor]:
        """The tensors on the device, for the current stream.

        Args:
            last: False: they will be taken once more, and come early then, too.
        """
        tensors = self.spill.fetch(spilled)
        with self._lock:
            waiting = [other for ref in self._kept if (other := ref()) is not None]
            others = [other for other in waiting if other is not spilled]
            self._kept = [weakref.ref(other) for other in (others if last else waiting)]
        for other in reversed(others[-_AHEAD:]):
            self.spill.prefetch(other)
        return tensors

    def saved_tensors(self, layer: int | None = None) -> saved_tensors_hooks:
        """Within it, what autograd saves is kept here: around a checkpointed layer, its input.

        Args:
            layer: its number; by default layers come in order.
        """
        number = next(self._layers) if layer is None else layer

        def pack(x: Tensor) -> Any:
            return x.detach() if self.spill.stays(x) else self.keep_input(number, x)

        return saved_tensors_hooks(pack, lambda kept: kept.take()[0] if isinstance(kept, Spilled) else kept)

    def _remember(self, spilled: Spilled | None) -> Spilled | None:
        if spilled is not None:
            with self._lock:
                self._kept = [ref for ref in self._kept if ref() is not None]
                self._kept.append(weakref.ref(spilled))
        return spilled


class Spilled:
    """Tensors that were kept: keys of the store, or on the device the tensors themselves; ``nbytes`` in whole units."""

    def __init__(self, graph: Graph, nbytes: int, tensors: list[Tensor]) -> None:
        self.graph, self.nbytes, self.tensors = graph, nbytes, tensors
        self.keys: list[int] = []

    def take(self, *, last: bool = True) -> list[Tensor]:
        """`Graph.take`."""
        return self.graph.take(self, last=last)
