"""Names the transfer that is late where waiting does not stop the host: with NCCL, whose watchdog ends the process in the end.

NCCL's own message has numbers of operations, but not what they were for and what to look at. So each transfer is put into a queue
with a description; a thread that sleeps most of the time drops those that are over and prints the oldest one that is nearly
out of time. Posting a transfer costs an append, an operation that the stream waits for at once a record of an event besides;
nothing ever waits for the device.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LATE = 0.9
"""Share of the time-out after which a transfer is reported: before NCCL ends the process."""


class StreamPlace:
    """What the current stream has to do by now, watched as a transfer is: over when the device has done it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def is_completed(self) -> bool:
        """Whether the device has come to this place."""
        return self._event.query()


@dataclass(slots=True)
class Watched:
    """A transfer that is watched; ``work`` None: another entry is watched in its place."""

    begin_s: float
    work: Any
    describe: Callable[[str], str]


class TransferWatch:
    """Transfers under way, in the order in which they are due."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._under_way: deque[Watched] = deque()
        look_s = min(1.0, timeout_s / 20)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=_look, args=(weakref.ref(self), look_s, device), name="sparse-ring-watch", daemon=True).start()

    def add(self, work: Any, describe: Callable[[str], str]) -> Watched:
        """Watch a transfer; ``describe`` makes a message of what happened to it."""
        entry = Watched(time.monotonic(), work, describe)
        self._under_way.append(entry)
        return entry

    def waited_for(self, entry: Watched, place: StreamPlace) -> None:
        """The stream waits for a transfer from ``place`` on, which is watched instead: a work may own the tensors that arrive.

        It is due behind what the stream has waited for before: if that is late, the place is late, too.
        """
        self._under_way.append(Watched(entry.begin_s, place, entry.describe))
        entry.work = None

    def late(self) -> str | None:
        """Forget what is over. A late transfer is described once; those behind it are forgotten with it."""
        while self._under_way:
            entry = self._under_way[0]
            age_s = time.monotonic() - entry.begin_s
            if _is_over(entry.work):
                self._under_way.popleft()
            elif age_s < _LATE * self._timeout_s:
                return None
            else:
                self._under_way.clear()
                return entry.describe(f"did not end in {age_s:.0f} s; NCCL ends the process after {self._timeout_s:g} s")
        return None


def _is_over(work: Any) -> bool:
    try:
        return work is None or bool(work.is_completed())
    except RuntimeError:  # it failed: whoever waits for it is told
        return True


def _look(reference: weakref.ref[TransferWatch], look_s: float, device: int | None) -> None:
    if device is not None:  # or this thread's questions would make a context on the first GPU
        torch.cuda.set_device(device)
    while True:
        time.sleep(look_s)
        watch = reference()
        if watch is None:
            return
        if (message := watch.late()) is not None:
            print(message, file=sys.stderr, flush=True)
        del watch  # or the watch would live as long as its thread
