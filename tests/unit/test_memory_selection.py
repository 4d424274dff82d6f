"""Bytes that choosing takes: what is predicted beside what the code allocates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ds_sparse_ring.config import SparseRingConfig, WindowSelector
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.index import VerticalSlash, density
from ds_sparse_ring.job import SHAPES, Job, Schedule
from ds_sparse_ring.memory import columns_of, memory_of, slots_of
from ds_sparse_ring.memory_selection import every_query_bytes, report_bytes
from ds_sparse_ring.select import every_query

PATTERNS, SEGMENT, SEGMENTS = 2, 4, 40


def _peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of the CPU's tensors when most are alive at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = call()
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = most = 0
    for change in sorted(changes, key=lambda e: e.start_ns()):
        alive += change.nbytes()
        most = max(most, alive)
    return most, out


@pytest.mark.parametrize("share", [0.1, 1.0])  # unpacking, or columns need most
def test_rows_and_densities_take_what_is_predicted(share: float) -> None:
    segments = tuple(
        Segment(i * SEGMENT, (i + 1) * SEGMENT, document_begin=0, valid_end=(i + 1) * SEGMENT * 64) for i in range(SEGMENTS)
    )
    slots = every_query._slots(segments, PATTERNS, WindowSelector(), torch.device("cpu"))
    bits = torch.rand(slots.count, 64, generator=torch.Generator().manual_seed(0)) < share
    words = (bits.long() << torch.arange(64)).sum(1)
    config = SparseRingConfig(segment_tokens=SEGMENT * 64)  # a pattern for each of two KV heads
    job = Job(SHAPES["qwen2.5-3b"], load_hardware("h200"), config, SEGMENTS * SEGMENT * 64, 1, 0.05, 0.05)
    assert slots.count == slots_of(job, 16)
    chosen, rows = _peak(lambda: every_query._compressed_rows(words, slots))
    predicted = every_query_bytes(rows[1].numel(), slots.count, 1e9, ranks=1) - words.numel() * 8
    assert 0.85 * predicted < chosen < 1.01 * predicted
    each = torch.arange(len(segments) * PATTERNS + 1)
    index = VerticalSlash(segments, PATTERNS, 1, each, torch.zeros_like(each[1:]), *rows)
    density(index)  # makes its tables
    told, _ = _peak(lambda: density(index))
    assert told == pytest.approx(report_bytes(rows[1].numel()), rel=0.01)


def test_a_layer_is_fullest_where_it_chooses_if_many_ranks_share_a_sequence_of_short_segments() -> None:
    def job(kind: str, segment: int, world: int = 64) -> Job:
        values = {"selector": {"kind": kind}, "segment_tokens": segment, "heads_per_pattern": None, "layer_chunk_tokens": 16384}
        config = SparseRingConfig.model_validate(values)
        return Job(SHAPES["llama-3.1-8b"], load_hardware("h200"), config, 1 << 20, world, 0.02, 0.02)

    def at_work(made: Job) -> float:
        return memory_of(made, Schedule()).parts["one layer at work"]

    short = job("every_query", 256)
    columns, n = columns_of(short, 32), (1 << 20) // 64
    slots = 8 * 4 * 4096 * 4097 / 2
    queries = n * 2 * (32 + 2 * 8) * 128
    assert at_work(short) == queries + max(slots * 8 + columns * 6 * 8, columns * 13 * 8)
    few = replace(short, columns=1e-6, density=1e-6)
    gathered = 2 * 8 * 128 * 2 * (1 << 20)
    assert at_work(few) == queries + slots * 8 + max(gathered, 2 * 64 * (1 << 20) * 8, (1 << 20) * 128 + columns_of(few, 32) * 8)
    assert at_work(short) > at_work(job("full", 256))
    assert at_work(replace(short, world=1)) == at_work(job("price", 256, world=1)), "one rank's own tensors need more"
