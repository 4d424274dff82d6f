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


class TransferWatch:
    """Transfers under way, oldest first."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._under_way: deque[tuple[float, Any, Callable[[str], str]]] = deque()
        look_s = min(1.0, timeout_s / 20)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=_look, args=(weakref.ref(self), look_s, device), name="sparse-ring-watch", daemon=True).start()

    def add(self, work: Any, describe: Callable[[str], str]) -> None:
        """Watch a transfer; ``describe`` makes a message of what happened to it."""
        self._under_way.append((time.monotonic(), work, describe))

    def late(self) -> str | None:
        """Forget what is over. A late transfer is described once; those behind it are forgotten with it."""
        while self._under_way:
            begin_s, work, describe = self._under_way[0]
            age_s = time.monotonic() - begin_s
            if _is_over(work):
                self._under_way.popleft()
            elif age_s < _LATE * self._timeout_s:
                return None
            else:
                self._under_way.clear()
                return describe(f"did not end in {age_s:.0f} s; NCCL ends the process after {self._timeout_s:g} s")
        return None


def _is_over(work: Any) -> bool:
    try:
        return bool(work.is_completed())
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
