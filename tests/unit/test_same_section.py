"""Ranks with different sections are refused as the ring is made, instead of hanging or writing wrongly in a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.runtime import SparseRing
from tests.common import DistributedTest


def _offload(path: str) -> dict[str, Any]:
    return {"offload": {"host_gib": 1.0, "disk_gib": 1.0, "disk_path": path}}


class TestSections(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("sections", "message"),
        [
            (
                ({"layer_chunk_tokens": 256}, {"layer_chunk_tokens": 128}),
                r"1 have another one than rank 0 \(1\): sparse_ring.layer_chunk_tokens is 256 on rank 0 and 128 on",
            ),
            (({}, {"ulysses_degree": 2}), "sparse_ring.ulysses_degree is 1 on rank 0 and 2 on rank 1: start"),
            ((_offload("/a"), {}), 'sparse_ring.offload is {"host_gib": 1.0, .*} on rank 0 and null on rank 1: start'),
            (
                ({}, {"log_steps": 1, "selector": {"kind": "full"}, "timeout_s": 60, "checkpoint": "index"}),
                'sparse_ring.selector is {.*} on rank 0 and {"kind": "full"} on rank 1; .*; 3 more keys differ',
            ),
        ],
    )
    def test_that_differ_are_refused_on_all_ranks(self, sections: tuple[dict[str, Any], ...], message: str) -> None:
        with pytest.raises(SparseRingError, match=message):
            SparseRing(SparseRingConfig(**sections[dist.get_rank()]))
        SparseRing(SparseRingConfig())  # the next ring is compared for itself

    def test_may_name_other_folders(self) -> None:
        for _ in range(2):
            SparseRing(SparseRingConfig(**_offload(f"/disk{dist.get_rank()}")))
