"""Sizes of chunks and pages: what they take, which are recommended, and what the command says of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import SHAPES, Job, Schedule, schedules
from ds_sparse_ring.plan_sizes import Choice, Sizes, all_keys, better, choose, longest_with_sizes, open_keys, try_sizes

MEASURED_MS = {2048: 360.2, 4096: 285.8, 8192: 272.4, 16384: 268.1, 32768: 263.0, 65536: 264.5}
"""A layer of 128K tokens, "A decoder layer in chunks" of docs/measurements.md; 43 of it are attention and index."""


def _job(tokens: int, world: int = 1, hardware: str = "h200", model: str = "qwen2.5-3b", **section: Any) -> Job:
    config = SparseRingConfig.model_validate({"selector": {"kind": "price"}} | section)
    return Job(SHAPES[model], load_hardware(hardware), config, tokens, world, 0.05, 0.015)


def _tried(job: Job, every: bool = False) -> list[Choice]:
    return try_sizes(job, [estimate(job, s) for s in schedules(job)], all_keys(job) if every else open_keys(job))


def test_the_rest_of_a_layer_takes_by_its_chunks_what_was_measured() -> None:
    def rest_ms(chunk: int | None, hardware: str = "h200") -> float:
        return estimate(_job(131072, hardware=hardware, layer_chunk_tokens=chunk), Schedule()).rest_ms

    for chunk, ms in MEASURED_MS.items():
        assert rest_ms(chunk) / rest_ms(16384) == pytest.approx((ms - 43) / (MEASURED_MS[16384] - 43), rel=1e-3)
    assert rest_ms(8192) < rest_ms(6000) < rest_ms(4096) and rest_ms(512) == rest_ms(2048)
    assert rest_ms(16384) == pytest.approx(rest_ms(None) / 0.88), "with which whole steps were reproduced"
    assert rest_ms(4096, "a100-80gb") == rest_ms(32768, "a100-80gb") > rest_ms(None, "a100-80gb")


@pytest.mark.parametrize(
    ("tokens", "world", "section", "chunk", "pages"),
    [
        (1 << 18, 1, {"offload": {"host_gib": 200}}, None, {32768, 65536, 131072}),  # whole layers fit: nothing is faster
        (1 << 20, 1, {"offload": {"host_gib": 200}}, 32768, {131072, 262144, 524288}),
        (5 << 18, 4, {}, 32768, set()),
    ],
)
def test_sizes_that_are_left_out_are_chosen_so_that_they_fit(
    tokens: int, world: int, section: dict[str, Any], chunk: int | None, pages: set[int]
) -> None:
    job = _job(tokens, world, **section)
    found = _tried(job)
    best = choose(job, found)
    assert best is not None and best.sizes == Sizes(chunk, None)
    assert not best.estimate.memory.misfits(job.hardware)
    alone = estimate(best.sizes.put_into(job), best.estimate.schedule)
    assert alone.step_ms == best.estimate.step_ms and alone.memory == best.estimate.memory
    assert {choice.sizes.page for choice in found} == {None} | pages


def test_pages_are_chosen_where_nothing_else_leaves_room() -> None:
    job = _job(12 << 20, 32, model="llama-3.1-8b", offload={"host_gib": 200})
    best = choose(job, _tried(job))
    assert best is not None and best.sizes.page == 1 << 19 and best.estimate.schedule == Schedule(8)
    assert best.estimate.memory.device < (job.hardware.memory_gib - 3) * 2**30


def test_nothing_is_recommended_where_nothing_fits_and_no_chunk_as_long_as_a_shard() -> None:
    job = _job(4 << 20)
    found = _tried(job)
    assert choose(job, found) is None and better(None, job, found) is None
    assert {choice.sizes for choice in _tried(_job(8192, 2))} == {Sizes(None, None)}
    assert {choice.sizes.chunk for choice in _tried(_job(16384))} == {None, 8192, 4096}


def test_sizes_of_the_configuration_are_kept_unless_others_save_two_percent_or_fit() -> None:
    def other(**section: Any) -> Choice | None:
        job = _job(1 << 20, **section)
        found = _tried(job)
        assert {choice.sizes for choice in found} == {Sizes.of(job)}
        return better(choose(job, found), job, _tried(job, every=True))

    offload = {"host_gib": 200, "kv_page_tokens": None}
    assert other(layer_chunk_tokens=20000, offload=offload) is None, "within 2 %"
    faster, fits = other(layer_chunk_tokens=2048, offload=offload), other(layer_chunk_tokens=None, offload=offload)
    assert faster is not None and fits is not None and faster.sizes == fits.sizes == Sizes(32768, None)


def test_the_longest_sequence_takes_other_sizes_only_if_they_make_it_longer() -> None:
    bound_by_host = _job(1, offload={"host_gib": 20})
    assert longest_with_sizes(bound_by_host, open_keys(bound_by_host))[0] == Sizes(None, None)
    job = _job(1)
    sizes, tokens, _, _ = longest_with_sizes(job, open_keys(job))
    assert sizes.chunk is not None and tokens > longest_with_sizes(job, set())[1]
    longest = estimate(sizes.put_into(replace(job, tokens=tokens)), Schedule())
    assert not longest.memory.misfits(job.hardware)


def test_the_command_names_keys_and_shows_copies(tmp_path: Path) -> None:
    def output(*options: str, **section: Any) -> str:
        file = tmp_path / "ds.json"
        values = {"zero_optimization": {"stage": 3}, "sparse_ring": {"selector": {"kind": "price"}} | section}
        file.write_text(json.dumps(values))
        result = CliRunner().invoke(app, ["plan", "--config", str(file), "--world", "1", *options])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    open_sizes = output("--seq", "1M", offload={"host_gib": 200})
    assert '"inner": "ring", "layer_chunk_tokens": 32768, "offload.kv_page_tokens": null' in open_sizes
    assert "the table is for these sizes" in open_sizes and "copies s" not in open_sizes and "does not fit" not in open_sizes
    kept = output("--seq", "256K", layer_chunk_tokens=16384)
    assert 'fastest that fits: "ulysses_degree": 1, "inner_degree": null, "inner": "ring", "layer_chunk_tokens": 16384' in kept
    assert "other sizes" not in kept and "kv_page_tokens" not in kept
    assert "17 % less time with other sizes" in output("--seq", "1M", layer_chunk_tokens=2048, offload={"host_gib": 200})
    misfit = output("--seq", "1M", layer_chunk_tokens=None, offload={"host_gib": 200})
    assert "no schedule fits" in misfit and "other sizes than those of the configuration fit: " in misfit
    disk = {"host_gib": 10, "disk_path": "/local/nvme", "disk_gib": 400, "staging_gib": 9}
    assert "copies s" in output("--seq", "1M", offload=disk)
    assert '"layer_chunk_tokens": 16384' in output("--max-seq")


def test_the_schedule_of_the_file_is_shown_and_an_impossible_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    for section, told in (
        ({"inner_degree": 2}, "ring of 4 x 2, as configured"),
        ({"ulysses_degree": 3}, "ulysses_degree = 3 does not"),
        ({"heads_per_pattern": 3}, "heads_per_pattern = 3 does not divide the 8 query heads"),
    ):
        path.write_text(json.dumps({"sparse_ring": section}))
        result = CliRunner().invoke(app, ["plan", "--config", str(path), "--world", "8" if "inner_degree" in section else "6"])
        assert told in result.output + result.stderr


def test_long_rings_are_left_out_and_a_misfit_names_the_longest_sequence() -> None:
    large, misfit = (
        CliRunner().invoke(app, ["plan", *words]).output for words in (["--world", "80"], ["--world", "1", "--seq", "1M"])
    )
    assert "3 schedules with rings of more than 64 ranks are left out" in large and "Ulysses 2 x ring of 40" in large
    assert re.search(r"the longest sequence that fits here: \d+ tokens", misfit)
