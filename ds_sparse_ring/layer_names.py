"""Layers named by number, range or module name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ds_sparse_ring.errors import SparseRingError

_KEY = "sparse_ring.dense_layers"
_RANGE = re.compile(r"(\d+)-(\d*)")


def resolve_layers(entries: Sequence[int | str], names: Mapping[str, int] | None) -> frozenset[int]:
    """The numbers of the layers that entries name.

    Args:
        entries: numbers (from the end if negative), ranges "first-last" (both belong to it; without a last one up to the end), or
            names, with ``*``, ``?`` and ``[...]`` as in file names, of attention modules or of modules around them.
        names: layer by the name of its attention module, of all layers; None: not known, then only numbers and closed ranges.

    Raises:
        SparseRingError: an entry that names no layer, or that only a known model can resolve.
    """
    return frozenset(layer for entry in entries for layer in _layers_of(entry, names))


def _layers_of(entry: int | str, names: Mapping[str, int] | None) -> list[int]:
    count = None if names is None else 1 + max(names.values(), default=-1)
    match = _RANGE.fullmatch(entry) if isinstance(entry, str) else None
    if names is None and not (match[2] if match else isinstance(entry, int) and entry >= 0):
        raise SparseRingError(
            f"{_KEY}: {entry!r} needs the model's layers: attach(model, ring) names them, for other models call "
            "ring.schedule.name_layers({name: number, ...}) of all layers before the first batch"
        )
    if isinstance(entry, int):
        found = [entry if entry >= 0 or count is None else count + entry]
    elif match:
        found = list(range(int(match[1]), int(match[2]) + 1 if match[2] else max(count or 0, int(match[1]) + 1)))
        if not found:
            raise SparseRingError(f"{_KEY}: the range {entry!r} ends before it begins: write the lower number first")
    else:
        found = [layer for name, layer in (names or {}).items() if _names(entry, name)]
        if not found:
            example = next(iter(names or {}), None)
            raise SparseRingError(f"{_KEY}: {entry!r} is the name of no layer; an attention module of this model is {example!r}")
    if count is not None and not all(0 <= layer < count for layer in found):
        raise SparseRingError(f"{_KEY}: {entry!r} is beyond the {count} layers of the model: use 0 to {count - 1}")
    return found


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names a module or one around it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))
