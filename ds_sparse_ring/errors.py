"""The one exception that users of the package need to know."""

from __future__ import annotations


class SparseRingError(ValueError):
    """A configuration, model, batch or environment that the package refuses.

    The message says what was found, what is allowed and how to get there. It is a ``ValueError``, so that callers who
    validate a configuration need not import this package to catch it.
    """
