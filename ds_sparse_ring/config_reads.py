"""Which keys of the section a selector reads. The others say nothing beside it."""

from __future__ import annotations

import json
from typing import Any

_OF_PROBES = ("probe", "probe_tokens", "local_blocks", "sink_tokens")
"""Who chooses, and what is active without being chosen."""

_WITH_PROBES = ("price", "top_p", "fixed")


def unread(selector: Any) -> tuple[str, ...]:
    """Keys without effect beside one of the kinds of `Selector`."""
    if selector.kind in _WITH_PROBES:
        return ()
    return (*_OF_PROBES, "segment_tokens", "heads_per_pattern") if selector.kind == "full" else _OF_PROBES


def check_reads(section: Any, selector: Any) -> None:
    """Refuse what a selector cannot take into account, or make sparse.

    A default may stand there, and anything beside the full index: that is compared with others under the same keys.

    Args:
        section: a `SparseRingConfig`; selector: its, one of the kinds of `Selector`.

    Raises:
        ValueError: its text starts with the key, as seen from the section.
    """
    for key in () if selector.kind == "full" else _OF_PROBES:
        value = getattr(section, key)
        if key in unread(selector) and value != type(section).model_fields[key].default:
            why, way_out = _why(key, selector)
            raise ValueError(f'{key} = {json.dumps(value)} has no effect on selector "{selector.kind}", {why}: {way_out}')
    if selector.kind == "every_query" and section.segment_tokens is None:
        raise ValueError(
            'segment_tokens = null makes one segment per document, of which selector "every_query" keeps each key that any query '
            "wants, nearly all of a long one: set segment_tokens (256 to 1024), or leave it out (512)"
        )


def _why(key: str, selector: Any) -> tuple[str, str]:
    """Why a key has no effect, and the way out."""
    if key in ("probe", "probe_tokens"):
        keep = 'use probe = "own"' if key == "probe" else "leave it out"
        return "which asks no probes", f'{keep}, or a selector that does ("price", "top_p", "fixed")'
    counterpart = "window_blocks" if key == "local_blocks" else key
    own = [name for name in type(selector).model_fields if name != "kind"]
    own = [counterpart] if counterpart in own else own
    return "which says itself what is active", f"leave it out, and set the selector's own {', '.join(own)}"
