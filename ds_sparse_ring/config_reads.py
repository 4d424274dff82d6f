"""Which keys of the section a selector reads. The others say nothing beside it."""

from __future__ import annotations

from typing import Any

_OF_PROBES = ("probe", "probe_tokens", "local_blocks", "sink_tokens")
"""Who chooses, and what is active without being chosen."""

_WITH_PROBES = ("price", "top_p", "fixed")


def unread(selector: Any) -> tuple[str, ...]:
    """Keys without effect beside one of the kinds of `Selector`."""
    if selector.kind in _WITH_PROBES:
        return ()
    return (*_OF_PROBES, "segment_tokens", "heads_per_pattern") if selector.kind == "full" else _OF_PROBES
