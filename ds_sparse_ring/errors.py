"""The one exception that users of the package need to know."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class SparseRingError(ValueError):
    """A configuration, model, batch or environment that the package refuses.

    The message says what was found, what is allowed and how to get there. It is a ``ValueError``, so that callers who
    validate a configuration need not import this package to catch it.
    """


@contextmanager
def refusals_end_the_program() -> Iterator[None]:
    """For a program's outermost call: a `SparseRingError` is told as its message, not as a traceback, and ends it with status 1.

    Of several ranks each one tells its own, named: it may be the only one.
    """
    try:
        yield
    except SparseRingError as error:
        rank = f"[rank {os.environ['RANK']}] " if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ else ""
        print(f"{rank}error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
