"""Copies of what layers keep: hidden where they were measured so, and paid for where the link or the disk is too slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.exposed_copies import exposed_copies_ms
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import SHAPES, Job, Schedule
from ds_sparse_ring.ladder import Budgets, KeptBytes, Ladder
from ds_sparse_ring.units import GIB

H200 = load_hardware("h200")
DISK = {"disk_path": "/local/nvme", "staging_gib": 9}


def _job(tokens: int, offload: dict[str, Any], world: int = 1, model: str = "qwen2.5-3b", **section: Any) -> Job:
    values = {"selector": {"kind": "price"}, "layer_chunk_tokens": 16384, "offload": offload}
    return Job(SHAPES[model], H200, SparseRingConfig.model_validate(values | section), tokens, world, 0.05, 0.03, liger=True)


@pytest.mark.parametrize(("tokens", "offload"), [(131072, {"host_gib": 80}), (1048576, {"host_gib": 124, "device_gib": 20})])
def test_where_no_waiting_for_copies_was_measured_none_is_predicted(tokens: int, offload: dict[str, Any]) -> None:
    assert estimate(_job(tokens, offload), Schedule()).copies_ms == 0


def test_the_measured_step_of_8b_at_1m_on_two_gpus_is_predicted_without_copies() -> None:
    selector = {"kind": "fixed", "columns": 13000, "slashes": 200}
    job = _job(1 << 20, {"host_gib": 116, "device_gib": 13}, 2, "llama-3.1-8b", selector=selector, segment_tokens=65536)
    e = estimate(replace(job, density=0.034, columns=0.02), Schedule(2))
    assert e.copies_ms == 0 and e.step_ms == pytest.approx(108.6e3, rel=0.04)


def test_a_disk_makes_a_step_slower_than_host_memory_does() -> None:
    host = estimate(_job(1 << 20, {"host_gib": 200}), Schedule())
    job = _job(1 << 20, {"host_gib": 10, "disk_gib": 400} | DISK)
    disk = estimate(job, Schedule())
    assert disk.memory.recomputed == 0 < host.memory.recomputed and disk.attention_ms < host.attention_ms
    assert disk.step_ms == pytest.approx(disk.attention_ms + disk.rest_ms + disk.copies_ms) and disk.step_ms > 2 * host.step_ms
    fast = replace(job, hardware=H200.model_copy(update={"disk_gb_s": 50.0}))
    assert estimate(fast, Schedule()).copies_ms == 0


def test_what_does_not_fit_beside_a_layer_is_exposed_by_the_slower_of_link_and_disk() -> None:
    shard = KeptBytes(3, 4 * GIB, (3 * GIB, GIB), pages=2 * GIB)
    ladder = Ladder(shard, Budgets(0, 0), ("disk", "host", "device"), ("host", "recompute", "device"))
    machine = H200.model_copy(update={"host_gb_s": GIB / 1e9, "disk_gb_s": 2 * GIB / 1e9})  # 1 and 2 GiB/s

    def exposed(forward_s: float, backward_s: float, again_s: float = 0.0, disk: float = 1.0) -> float:
        hardware = machine.model_copy(update={"disk_gb_s": disk * machine.disk_gb_s})
        return exposed_copies_ms(ladder, hardware, 1e3 * forward_s, 1e3 * backward_s, 1e3 * again_s) / 1e3

    # over the link 8, 4 and 0 GiB forward, and 2 of pages more backward; to the disk 4
    assert exposed(8, 10) == 0 and exposed(7, 10) == pytest.approx(1) and exposed(8, 9) == pytest.approx(1)
    assert exposed(3, 10) == pytest.approx(5 + 1) and exposed(8, 5) == pytest.approx(5 + 1)
    assert exposed(8, 5, again_s=1) == pytest.approx(5), "what attends again has longer"
    assert exposed(8, 10, disk=0.2) == pytest.approx(2 + 0), "4 GiB at 0.4 GiB/s take 10 s"
