"""What attention keeps for a layer that gradient checkpointing runs twice.

Each checkpointed call gets a *slot*. The first pass puts the attention state (the index, and with
``"checkpoint": "output"`` the output and the columns' keys and values) into it; the replay takes the states out again in the
same order, so it neither selects, communicates nor attends a second time, and a selection can never differ between the two.

The slot reaches attention through a context variable that is set only while the checkpointed function runs; autograd may replay
on another thread than the one that recorded, each enters its own context.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

from ds_sparse_ring.errors import SparseRingError

T = TypeVar("T")


class Slot(Generic[T]):
    """The states of one checkpointed call, in the order of its attention calls."""

    def __init__(self) -> None:
        self._states: list[T] = []
        self._next: int | None = None

    def put(self, state: T) -> None:
        """Keep a state (first pass)."""
        self._states.append(state)

    def take(self) -> T | None:
        """The next kept state while replaying, None in the first pass."""
        if self._next is None:
            return None
        if self._next >= len(self._states):
            raise SparseRingError(
                "gradient checkpointing: the replay calls attention more often than the first pass did; "
                "a layer must run the same way twice"
            )
        self._next += 1
        return self._states[self._next - 1]

    def rewind(self) -> None:
        """Start a replay at the first state; a graph that is kept can be replayed again."""
        self._next = 0


class Latest:
    """The checkpointed call of a forward pass that ran last, as long as something else keeps it: the graph."""

    def __init__(self) -> None:
        self._call: weakref.ref[Any] | None = None

    def set(self, call: object) -> None:
        """It has run."""
        self._call = weakref.ref(call)

    def get(self) -> Any:
        """The call, or None."""
        return None if self._call is None else self._call()


_current: ContextVar[Slot | None] = ContextVar("ds_sparse_ring_slot", default=None)


def current_slot() -> Slot | None:
    """The slot of the checkpointed call that is running, None outside of one."""
    return _current.get()


class _Inside(AbstractContextManager[None]):
    """Makes a slot the current one. Unlike a generator's it can be entered again: a second backward pass replays again."""

    def __init__(self, slot: Slot, *, replay: bool) -> None:
        self._slot, self._replay = slot, replay
        self._tokens: list[Token[Slot | None]] = []

    def __enter__(self) -> None:
        if self._replay:
            self._slot.rewind()
        self._tokens.append(_current.set(self._slot))

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._tokens.pop())


def checkpoint_context_fn() -> tuple[AbstractContextManager, AbstractContextManager]:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``: a fresh slot per call."""
    slot: Slot = Slot()
    return _Inside(slot, replay=False), _Inside(slot, replay=True)
