"""Estimates of a training step: against measured ones, against what must hold, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import SHAPES, Job, Schedule, estimate, load_shape, schedules
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.plan_report import parse_tokens

FULL = SparseRingConfig(selector={"kind": "full"})


def _job(world: int, tokens: int = 131072, config: SparseRingConfig = FULL, density: float = 1.0, columns: float = 0.0) -> Job:
    return Job(SHAPES["qwen2.5-3b"], load_hardware("h200"), config, tokens, world, density, columns, zero_stage=2)


@pytest.mark.parametrize(
    ("config", "shares", "rates", "attention_s", "step_s", "memory_gib"),
    [
        (FULL, (1.0, 0.0), {"dense_forward": 603, "dense_backward": 533}, 16.0, 23.0, 104),  # cuDNN
        (FULL, (1.0, 0.0), {}, 14.1, 21.1, 104),  # flash-attn-4
        (SparseRingConfig(), (0.052, 0.03), {}, None, 8.98, 111),  # its selector, unlike this one, takes 0.5 s
    ],
)
def test_measured_steps_on_one_gpu_are_reproduced(config, shares, rates, attention_s, step_s, memory_gib) -> None:
    """The table of training steps in docs/measurements.md: 128K tokens on one H200."""
    job = _job(1, config=config, density=shares[0], columns=shares[1])
    e = estimate(replace(job, hardware=job.hardware.model_copy(update=rates)), Schedule())
    assert attention_s is None or e.attention_ms == pytest.approx(1e3 * attention_s, rel=0.1)
    assert e.step_ms == pytest.approx(1e3 * step_s, rel=0.1)
    assert e.memory == pytest.approx(memory_gib * 2**30, rel=0.1)


def test_the_shape_of_a_model_counts_its_parameters() -> None:
    assert SHAPES["qwen2.5-3b"].parameters == pytest.approx(3.09e9, rel=0.01)


def test_more_ranks_share_the_work_and_the_memory() -> None:
    one, four = estimate(_job(1), Schedule()), estimate(_job(4), Schedule())
    assert four.step_ms < one.step_ms / 3.5
    assert four.memory < one.memory / 2


def test_schedules_follow_ranks_and_heads() -> None:
    def names(job: Job) -> list[str]:
        return [schedule.name(job.world) for schedule in schedules(job)]

    assert schedules(_job(1)) == [Schedule(1, None, "ring")]
    assert names(_job(16)) == [
        "ring of 16", "ring of 2 x 8", "ring of 2 x gather of 8",
        "Ulysses 2 x ring of 8", "Ulysses 2 x ring of 2 x 4", "Ulysses 2 x ring of 2 x gather of 4",
        "Ulysses 4 x ring of 4", "Ulysses 4 x ring of 2 x 2", "Ulysses 4 x ring of 2 x gather of 2",
        "Ulysses 8 x ring of 2",
    ]  # fmt: skip
    assert names(_job(3)) == ["ring of 3", "gather of 3"], "16 heads do not divide by 3"
    shared = SparseRingConfig(heads_per_pattern=8)
    assert names(_job(8, config=shared)) == ["ring of 8", "gather of 8", "Ulysses 2 x ring of 4", "Ulysses 2 x gather of 4"], (
        "a pattern needs its eight heads on one rank"
    )


def test_gathering_saves_latencies_and_costs_buffers() -> None:
    job = _job(8, tokens=32768, config=SparseRingConfig(), density=0.05)
    ring, gathered = (estimate(job, schedule) for schedule in (Schedule(), Schedule(1, 8, "gather")))
    assert gathered.memory > ring.memory
    assert gathered.report.backward.kv_buffers == 8 and ring.report.backward.kv_buffers == 2
    assert gathered.forward.compute == pytest.approx(ring.forward.compute)
    assert gathered.forward.exposed < ring.forward.exposed / 3 and gathered.step_ms < ring.step_ms


def test_what_cannot_be_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match="degree = 5 does not divide the 8 ranks of this run: use 1, 2, 4 or 8"):
        estimate(_job(8, config=SparseRingConfig(degree=5)), Schedule())
    with pytest.raises(SparseRingError, match="neither a folder with config.json nor one of qwen2.5-3b"):
        load_shape("no-such-model")
    with pytest.raises(SparseRingError, match="neither a file nor one of h200, h100"):
        load_hardware("tpu")
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine"}))
    with pytest.raises(SparseRingError, match="mine.json"):
        load_hardware(str(tmp_path / "mine.json"))
    for text in ("", "K", "-1", "many"):
        with pytest.raises(SparseRingError, match="no number of tokens"):
            parse_tokens(text)
    assert [parse_tokens(text) for text in ("100", "128K", "1.5m")] == [100, 131072, 3 << 19]


def test_a_models_folder_and_a_hardware_file_are_read(tmp_path: Path) -> None:
    shape, hardware = SHAPES["llama-3.1-8b"], load_hardware("h100")
    (tmp_path / "config.json").write_text(json.dumps({**shape.model_dump(), "model_type": "llama"}))
    assert load_shape(str(tmp_path)) == shape
    (tmp_path / "hardware.json").write_text(hardware.model_dump_json())
    assert load_hardware(str(tmp_path / "hardware.json")) == hardware


def test_the_command_prints_schedules_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["plan", "--seq", "256K", "--world", "4", "--timeline", str(trace)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for text in ("ring of 4", "gather of 4", "Ulysses 2 x ring of 2", "Ulysses 4 x ring of 1", "fastest that fits", "assumed"):
        assert text in result.output
    assert json.loads(trace.read_text())["traceEvents"]
    assert trace.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["plan", "--density", "0.01", "--columns", "0.02"])
    assert refused.exit_code == 1 and "0 <= columns <= density" in refused.output


def test_offload_moves_what_layers_keep_from_the_device_to_the_host() -> None:
    offload = SparseRingConfig.model_validate({"offload": {"host_gib": 90}})
    on_device, offloaded = (
        estimate(_job(1, 524288, config=config, density=0.05), Schedule()) for config in (SparseRingConfig(), offload)
    )
    kept = 36 * 524288 * (2048 + 2048) * 2
    assert offloaded.host_memory == kept and on_device.host_memory == 0
    assert on_device.memory - offloaded.memory == pytest.approx(kept * 32 / 36), "four layers are on their way"


def test_pages_save_buffers_on_the_device_and_cost_host_memory() -> None:
    job = _job(4, 1 << 20, density=0.05)
    estimates = []
    for page in (None, 1 << 15, 1 << 20):
        config = SparseRingConfig.model_validate({"offload": {"host_gib": 90, "kv_page_tokens": page}})
        estimates.append(estimate(replace(job, config=config), Schedule()))
    whole, paged, one_page = estimates
    kv_bytes = 2 * 2 * 128 * (1 << 18) * 2  # of a shard of a layer, bfloat16; gradients are twice as much
    assert paged.host_memory - whole.host_memory == kv_bytes
    assert whole.memory - paged.memory == pytest.approx((2 + 3 * 2) * kv_bytes - (3 + 3 * 2) * kv_bytes / 8)
    assert one_page.memory == whole.memory
    assert paged.step_ms == pytest.approx(whole.step_ms, rel=0.02)


def test_columns_are_waited_for_only_beyond_the_hops_beside_them() -> None:
    def columns_ms(segment: int, share: float, gb_s: float, world: int = 2) -> float:
        job = _job(world, config=SparseRingConfig(segment_tokens=segment), density=0.03, columns=share)
        links = job.hardware.model_copy(update={"inner_gb_s": gb_s})
        return estimate(replace(job, hardware=links), Schedule()).columns_ms

    assert columns_ms(1024, 0.03, 300) == 0 < columns_ms(16384, 0.01, 20)
    assert columns_ms(1024, 0.03, 20, world=1) == columns_ms(1024, 0.0, 20) == 0
    # short segments have more columns, but the rows of two key/value heads that these can name come to an end
    many, more = columns_ms(2048, 0.01, 20), columns_ms(1024, 0.01, 20)
    assert 2 * columns_ms(16384, 0.01, 20) < many < more < 1.1 * many


def test_the_plan_shows_what_is_offloaded_and_whether_it_fits(tmp_path: Path) -> None:
    outputs = []
    for gib in (80, 20):
        file = tmp_path / f"{gib}.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "sparse_ring": {"offload": {"host_gib": gib}}}))
        command = ["plan", "--config", str(file), "--seq", "256K", "--world", "1", "--hardware", "h200"]
        outputs.append(CliRunner().invoke(app, command).output)
    assert all("offloaded GiB" in output for output in outputs)
    assert "fastest that fits" in outputs[0] and "no schedule fits the memory" in outputs[1]
