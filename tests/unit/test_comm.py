"""Process groups as they are asked for, without any process but this one."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import SparseRingConfig


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.high = is_high_priority_stream


def _created(monkeypatch: pytest.MonkeyPatch, backend: str, **config: Any) -> list[tuple[list[int], _Options | None]]:
    """Ranks and options of all groups that rank 0 of 8 asks for."""
    created: list[tuple[list[int], _Options | None]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout, pg_options: created.append((ranks, pg_options)))
    if backend == "nccl":
        monkeypatch.setattr(dist, "ProcessGroupNCCL", type("ProcessGroupNCCL", (), {"Options": _Options}), raising=False)
    else:
        monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)  # as in builds without it
    Axes.create(SparseRingConfig(**config))
    return created


def test_groups_whose_transfers_hide_behind_work_run_at_high_priority_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    created = _created(monkeypatch, "nccl", ulysses_degree=2, inner_degree=2)
    high = [ranks for ranks, options in created if options is not None and options.high]
    rings, inner, outer = [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert high == [*rings, *rings, *groups, *inner, *outer], "the ring's, the columns', those for heads, the levels'"
    assert [ranks for ranks, options in created if options is None] == [[*range(8)]]
    every = [options for _, options in created if options is not None]
    assert len({id(options) for options in every}) == len(every), "torch writes the group's name into its options"


def test_other_backends_get_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    created = _created(monkeypatch, "gloo", inner_degree=4)
    assert len(created) == 1 + 2 + 2 + 4 and all(options is None for _, options in created)
