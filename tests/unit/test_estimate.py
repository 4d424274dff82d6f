"""Estimates of a training step: against measured ones, against what must hold, and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import Estimate, estimate
from ds_sparse_ring.hardware import load_hardware, rate_at
from ds_sparse_ring.job import SHAPES, Job, Schedule, load_shape, schedules, states_of
from ds_sparse_ring.kernels import contract
from ds_sparse_ring.memory import Memory, column_parts, columns_of, longest_sequence, memory_of, refuse_misfit
from ds_sparse_ring.plan_report import parse_tokens, read_job

FULL, PROBES = (SparseRingConfig(selector={"kind": kind}) for kind in ("full", "price"))
TRITON = {"sparse_backward": 321, "ring_dense_backward": 412}
"""Rates of the backward kernels that the steps were measured with."""
FIRST_CUDA = {"sparse_backward": 400}


def _job(world: int, tokens: int = 131072, config: SparseRingConfig = FULL, density: float = 1.0, columns: float = 0.0) -> Job:
    return Job(SHAPES["qwen2.5-3b"], load_hardware("h200"), config, tokens, world, density, columns, zero_stage=2)


@pytest.mark.parametrize(
    ("config", "shares", "rates", "attention_s", "step_s", "memory_gib"),
    [
        (FULL, (1.0, 0.0), {"dense_forward": 603, "dense_backward": 533}, 16.0, 23.0, 104),  # cuDNN
        (FULL, (1.0, 0.0), {}, 14.1, 21.1, 104),  # flash-attn-4
        (PROBES, (0.052, 0.031), TRITON, None, 8.98, 105.1),  # its selector, unlike this one, takes 0.5 s
        (SparseRingConfig(selector={"kind": "price"}, offload={"host_gib": 80}), (0.052, 0.031), TRITON, None, 9.0, 70.3),
    ],
)
def test_measured_steps_on_one_gpu_are_reproduced(config, shares, rates, attention_s, step_s, memory_gib) -> None:
    """The table of training steps in docs/measurements.md: 128K tokens on one H200."""
    job = _job(1, config=config, density=shares[0], columns=shares[1])
    e = estimate(replace(job, hardware=job.hardware.model_copy(update=rates)), Schedule())
    assert attention_s is None or e.attention_ms == pytest.approx(1e3 * attention_s, rel=0.1)
    assert e.step_ms == pytest.approx(1e3 * step_s, rel=0.1)
    assert e.memory.device == pytest.approx(memory_gib * 2**30, rel=0.02)


def fixed(columns: int, slashes: int, segment: int = 16384, host_gib: int = 100, device_gib: int = 0) -> dict[str, Any]:
    selector = {"kind": "fixed", "columns": columns, "slashes": slashes}
    return {"selector": selector, "segment_tokens": segment, "offload": {"host_gib": host_gib, "device_gib": device_gib}}


@pytest.mark.parametrize(
    ("world", "tokens", "section", "shares", "liger", "rates", "attention_s", "step_s", "memory_gib"),
    [
        (1, 262144, fixed(5200, 104), (0.0541, 0.0333), False, TRITON, 5.86, 22.7, 61.2),
        (1, 262144, fixed(5200, 104), (0.0537, 0.033), True, TRITON, 5.51, 18.9, 59.6),
        (1, 524288, fixed(10400, 208, device_gib=40), (0.0548, 0.0347), True, TRITON, 23.4, None, 112.8),
        (2, 262144, fixed(5200, 104), (0.0537, 0.033), True, TRITON, None, 10.28, 34.2),
        (1, 262144, fixed(5200, 104), (0.0537, 0.033), True, FIRST_CUDA, 4.73, 18.7, 61.6),
        (1, 1048576, fixed(20800, 416, 32768, 124, 20), (0.0528, 0.0348), True, FIRST_CUDA, 86.8, 143.8, None),
        (1, 262144, {"selector": {"kind": "full"}}, (1.0, 0.0), True, TRITON, 54.8, None, 59.3),
        (2, 262144, {"selector": {"kind": "full"}}, (1.0, 0.0), True, TRITON, 38.2, 45.6, 34.0),
    ],
)
def test_measured_steps_of_chunked_layers_are_reproduced(
    world, tokens, section, shares, liger, rates, attention_s, step_s, memory_gib
) -> None:
    """Of docs/measurements.md, too; a step_s of None: only the first one was measured, in which host memory is pinned."""
    backend = "triton" if rates is TRITON else "cuda"
    common = {"segment_tokens": 16384, "layer_chunk_tokens": 16384, "offload": {"host_gib": 100}, "backend": backend}
    job = _job(world, tokens, SparseRingConfig.model_validate(common | section), *shares)
    hardware = job.hardware.model_copy(update=rates)
    e = estimate(replace(job, zero_stage=3, liger=liger, hardware=hardware), Schedule())
    assert attention_s is None or e.attention_ms - 36 * e.index_ms == pytest.approx(1e3 * attention_s, rel=0.1)
    assert step_s is None or e.step_ms == pytest.approx(1e3 * step_s, rel=0.1)
    assert memory_gib is None or e.memory.device == pytest.approx(memory_gib * 2**30, rel=0.03)


@pytest.mark.parametrize(
    ("model", "world", "tokens", "section", "shares", "ulysses", "step_s", "memory_gib"),
    [
        ("qwen2.5-3b", 1, 262144, fixed(5200, 104), (0.054, 0.033), 1, 17.6, 60.6),
        ("qwen2.5-3b", 2, 262144, fixed(5200, 104), (0.054, 0.033), 1, 9.77, 35.0),
        ("qwen2.5-3b", 2, 262144, fixed(5200, 104), (0.0565, 0.034), 2, 9.55, 35.2),
        ("qwen2.5-3b", 1, 262144, {"selector": {"kind": "every_query"}, "segment_tokens": 512}, (0.058, 0.058), 1, 25.8, 68.7),
        ("llama-3.1-8b", 2, 1048576, fixed(13000, 200, 65536, 116, 13), (0.034, 0.0218), 2, 108.6, 117.8),
    ],
)
def test_measured_steps_of_the_last_kernels_are_reproduced(
    model, world, tokens, section, shares, ulysses, step_s, memory_gib
) -> None:
    """Of docs/measurements.md: both passes by the CUDA kernels, ZeRO-3, chunks of 16384, Liger."""
    common = {"layer_chunk_tokens": 16384, "offload": {"host_gib": 100}}
    config = SparseRingConfig.model_validate(common | section)
    job = Job(SHAPES[model], load_hardware("h200"), config, tokens, world, shares[0], shares[1], liger=True)
    e = estimate(job, Schedule(ulysses))
    assert e.step_ms == pytest.approx(1e3 * step_s, rel=0.1)
    assert e.memory.device == pytest.approx(memory_gib * 2**30, rel=0.035)


@pytest.mark.parametrize(("tokens", "gib"), [(524288, 2), (1048576, 4)])  # of one KV head
def test_sums_of_query_gradients_are_counted_where_the_cuda_kernels_make_them(tokens: int, gib: float) -> None:
    chunked = FULL.model_copy(update={"layer_chunk_tokens": 16384})  # attention, not an MLP, needs most
    cuda, triton = (memory_of(_job(1, tokens, chunked.model_copy(update={"backend": x})), Schedule()) for x in ("cuda", "triton"))
    assert cuda.device - triton.device == gib * 2**30


def test_the_fixed_selector_says_how_many_columns_memory_must_hold() -> None:
    selector = {"kind": "fixed", "columns": 5000, "slashes": 10}
    config = SparseRingConfig.model_validate({"selector": selector, "segment_tokens": 4096, "heads_per_pattern": 2})
    assert columns_of(_job(1, 10000, config), 16) == 8 * (4096 + 5000 + 5000)  # a segment's own tokens bound the first ones


def test_where_every_query_chooses_all_scores_are_paid_for_and_a_pattern_holds_its_columns_once() -> None:
    config = SparseRingConfig(selector={"kind": "every_query"}, segment_tokens=1024, heads_per_pattern=8)
    job = _job(2, config=config, density=0.05, columns=0.05)
    flops = 16 * 131072 * 131073 / 2 * 2 * 128
    scores, columns = flops / 2 / job.hardware.scores / 1e9, columns_of(job, 16)
    assert columns == pytest.approx(2 * 0.05 * 131072**2 / 2 / 1024)
    received = 65536 * 2 * 128 * 2 + 2 * 16 * sum(range(1, 129)) * 8  # the other rank's keys, and its bits
    gathered = 2 * job.hardware.latency_ms + received / 300e6
    assert estimate(job, Schedule()).index_ms == pytest.approx(scores + 0.1 * columns / 1e6 + gathered)
    shared = replace(job, config=config.model_copy(update={"heads_per_pattern": None}))
    assert columns_of(shared, 16) == columns_of(job, 16) and columns_of(shared, 4) == columns_of(job, 8), (
        "4 ranks share 2 KV heads"
    )


@pytest.mark.parametrize(  # segments, heads of a pattern, forward, backward, and gathered and returned, ms
    ("segment", "group", "measured"),
    [(256, 8, (6.77, 36.3, 8.39)), (1024, 8, (6.68, 22.8, 2.36)), (16384, 1, (6.71, 19.3, 1.45))],
)
def test_what_short_segments_cost_in_attention_is_reproduced(segment: int, group: int, measured: tuple[float, ...]) -> None:
    """The last table of "By every query" in docs/measurements.md; its last column has 0.3 ms of row sums, too."""
    config = SparseRingConfig(selector={"kind": "every_query"}, segment_tokens=segment, heads_per_pattern=group)
    e = estimate(_job(1, config=config, density=0.05, columns=0.05), Schedule())
    moved_once = e.moved_ms * 6 / 8  # the replay gathers again
    assert [e.forward.compute, e.backward.compute] == [pytest.approx(ms, rel=0.05) for ms in measured[:2]]
    assert moved_once == pytest.approx(measured[2] - 0.35, rel=0.1)


def test_rates_hold_between_their_numbers_and_where_fewer_queries_of_a_segment_are_on_a_rank() -> None:
    rate = {2048: 200.0, 8192: 400.0}
    assert [rate_at(rate, x) for x in (64, 2048, 4096, 8192, math.inf)] == [200, 200, pytest.approx(300), 400, 400]
    assert rate_at(321, 64) == 321, "one number, as files had it before"

    def compute_ms(world: int, share: float = 0.05, **values: Any) -> float:
        config = SparseRingConfig.model_validate({"selector": {"kind": "every_query"}, "segment_tokens": 1024} | values)
        return estimate(_job(world, config=config, density=0.05, columns=share), Schedule()).backward.compute

    assert 2 * compute_ms(2) > 1.1 * compute_ms(1), "a striped ring shares out each segment"
    assert 2 * compute_ms(2, layout="zigzag") == pytest.approx(compute_ms(1))
    assert compute_ms(1, heads_per_pattern=1) > 1.5 * compute_ms(1)
    assert compute_ms(1, share=0.0, heads_per_pattern=1) < compute_ms(1), "diagonals do not depend on segments"


def test_a_file_of_one_number_a_rate_and_without_later_fields_is_valid(tmp_path: Path) -> None:
    older = load_hardware("h200").model_dump(exclude={"column_gb_s", "listing_ms"}) | {"sparse_backward": 430}
    (tmp_path / "older.json").write_text(json.dumps(older))
    hardware = load_hardware(str(tmp_path / "older.json"))
    config = SparseRingConfig(selector={"kind": "every_query"})
    e = estimate(replace(_job(1, config=config, density=0.05, columns=0.05), hardware=hardware), Schedule())
    assert hardware.sparse_backward == 430 and e.moved_ms == 0 < e.step_ms
    (tmp_path / "newer.json").write_text(json.dumps(older | {"sparse_backward": {"2048": 243, "8192": 388}}))
    assert load_hardware(str(tmp_path / "newer.json")).sparse_backward == {2048: 243, 8192: 388}
    (tmp_path / "none.json").write_text(json.dumps(older | {"sparse_backward": {}}))
    with pytest.raises(SparseRingError, match="sparse_backward"):
        load_hardware(str(tmp_path / "none.json"))


def test_the_shape_of_a_model_counts_its_parameters() -> None:
    assert SHAPES["qwen2.5-3b"].parameters == pytest.approx(3.09e9, rel=0.01)


def test_more_ranks_share_the_work_and_the_memory() -> None:
    one, four = (estimate(_job(world, config=PROBES, density=0.1), Schedule()) for world in (1, 4))
    assert four.step_ms < one.step_ms / 3.5
    assert four.memory.device < one.memory.device / 2


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
    job = _job(8, tokens=32768, config=PROBES, density=0.05)
    ring, gathered = (estimate(job, schedule) for schedule in (Schedule(), Schedule(1, 8, "gather")))
    assert gathered.memory.device >= ring.memory.device
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
    without = {key: value for key, value in shape.model_dump().items() if key != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps(without))
    assert load_shape(str(tmp_path)).num_key_value_heads == shape.num_attention_heads, "each query head has its own"
    (tmp_path / "config.json").write_text(json.dumps({**shape.model_dump(), "model_type": "llama"}))
    (tmp_path / "hardware.json").write_text(hardware.model_dump_json())
    assert load_hardware(str(tmp_path / "hardware.json")) == hardware


def test_the_command_prints_schedules_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["plan", "--seq", "256K", "--world", "4", "--timeline", str(trace)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for text in (
        "ring of 4",
        "gather of 4",
        "Ulysses 2 x ring of 2",
        "Ulysses 4 x ring of 1",
        "fastest that fits",
        "assumed",
        "density 0.05",
    ):
        assert text in result.output
    assert json.loads(trace.read_text())["traceEvents"]
    assert trace.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["plan", "--density", "0.01", "--columns", "0.02"])
    assert refused.exit_code == 1 and "0 <= columns <= density" in refused.output


def test_columns_follow_the_density_unless_they_are_given(tmp_path: Path) -> None:
    probes = tmp_path / "probes.json"
    probes.write_text(json.dumps({"sparse_ring": {"selector": {"kind": "price"}}}))

    def shares(density: float, columns: float | None, file: Path | None = probes) -> tuple[float, float]:
        job = read_job(file, "qwen2.5-3b", 65536, 1, "h200", density, columns)
        return job.density, job.columns

    assert shares(0.05, None) == (0.05, 0.015) and shares(0.01, None) == (0.01, 0.003)
    assert shares(0.05, 0.0) == (0.05, 0.0)
    assert shares(0.05, None, file=None) == (0.05, 0.05), "where every query chooses there is nothing else"
    assert CliRunner().invoke(app, ["plan", "--seq", "64K", "--world", "1", "--density", "0.01"]).exit_code == 0


def test_a_plan_that_does_not_fit_names_device_memory_once() -> None:
    result = CliRunner().invoke(app, ["plan", "--seq", "4M", "--world", "1"])
    assert result.exit_code == 0 and result.output.count("device memory") == 1
    assert "no schedule fits the memory" in result.output and "kept by layers" in result.output
    assert "does not fit" in result.output


def test_two_gpus_need_what_was_measured() -> None:
    """53.0 GiB on rank 0. Its part of the gradients comes when its layers' tensors are gone; that of rank 1 does not."""
    e = estimate(_job(2, config=PROBES, density=0.053, columns=0.031), Schedule())
    assert 53.0 <= e.memory.device / 2**30 < 53.0 * 1.06


def _offload(**values: Any) -> SparseRingConfig:
    keys = {key: values.pop(key) for key in ("checkpoint", "layer_chunk_tokens", "layer_inputs_every") if key in values}
    return SparseRingConfig.model_validate({"offload": values, **keys})


def test_offload_moves_what_layers_keep_from_the_device_to_the_host() -> None:
    def memory(config: SparseRingConfig) -> Memory:
        return memory_of(_job(1, 524288, config=config, density=0.05), Schedule())

    layer = 524288 * (2 * 2048 + 2 * 2048 + 4 * 16)  # input, output, log-sum-exp
    on_device, outside, both = (
        memory(config) for config in (PROBES, _offload(host_gib=150), _offload(host_gib=150, device_gib=20))
    )
    assert outside.host == 36 * layer and on_device.host == 0
    assert on_device.device - outside.device == 34 * layer, "this layer's and the next one's are there"
    assert both.host < outside.host and 0 < both.device - outside.device <= 20 * 2**30
    index = memory(_offload(host_gib=150, checkpoint="index"))
    assert index.host == 36 * 524288 * 2 * 2048 and index.recomputed == 36 and outside.recomputed == 0
    short = memory(_offload(host_gib=40))
    assert short.misfit and short.host > 40 * 2**30, "it says what it would take"


def test_attending_again_takes_time_and_no_room() -> None:
    kept, again = (
        estimate(_job(1, 524288, config=_offload(host_gib=150, checkpoint=how), density=0.05), Schedule())
        for how in ("output", "index")
    )
    assert again.step_ms - kept.step_ms == pytest.approx(36 * kept.forward.total)


def test_fewer_inputs_take_less_room_and_a_forward_pass_of_the_layers_before_others() -> None:
    x, layers = 524288 * 2 * 2048, 36
    for how in ("output", "index"):
        values: dict[str, Any] = {"host_gib": 150, "checkpoint": how, "layer_chunk_tokens": 16384}
        one, four = (_job(1, 524288, _offload(**values, layer_inputs_every=n), 0.05) for n in (1, 4))
        before, after = estimate(one, Schedule()), estimate(four, Schedule())
        assert before.memory.host - after.memory.host == (layers - 9) * x and after.memory.recomputed == before.memory.recomputed
        assert after.memory.device - before.memory.device == 3 * x, "the others of a group wait on the device"
        again = 27 * before.forward.total if how == "index" else 0.0
        assert after.attention_ms - before.attention_ms == pytest.approx(again)
        layer_parameters = one.model.layer_parameters
        share = 27 / layers * 2 * layer_parameters / (8 * (layer_parameters + one.model.vocab_size * one.model.hidden_size))
        assert after.rest_ms == pytest.approx(before.rest_ms * (1 + share))
    kept = [replace(job, config=job.config.model_copy(update={"offload": None})) for job in (one, four)]
    parts = [memory_of(job, Schedule()).parts["kept by layers"] for job in kept]
    assert parts[0] - parts[1] == (36 - 9 - 3) * x
    assert longest_sequence(four)[0] > 1.5 * longest_sequence(one)[0]
    frozen = [
        memory_of(replace(job, zero_stage=3, trained_share=0.01), Schedule()).parts["weights gathered"] for job in (one, four)
    ]
    assert frozen[1] - frozen[0] == pytest.approx(3 * 2 * one.model.layer_parameters / layers)


def test_layers_in_chunks_need_less_and_fit_longer_sequences() -> None:
    whole, chunked = _offload(host_gib=200), _offload(host_gib=200, layer_chunk_tokens=16384)
    (short, _, _), (long, schedule, reasons) = (
        longest_sequence(_job(1, config=config, density=0.05)) for config in (whole, chunked)
    )
    assert long > 2 * short and long % 4096 == 0 and schedule == Schedule()
    assert "the inputs of 36 checkpointed layers" in reasons[0], "now the host is what bounds"
    job = _job(1, long, config=chunked, density=0.05)
    assert not memory_of(job, Schedule()).misfits(job.hardware)
    assert memory_of(replace(job, tokens=long + 4096), Schedule()).misfits(job.hardware)


def test_what_cannot_fit_is_refused_with_bytes_and_ways_out() -> None:
    job, gib = _job(2, 524288), 2**30
    needed = memory_of(job, Schedule()).device
    refuse_misfit(job, Schedule(), needed / 1.09)
    refuse_misfit(job, Schedule(), None)
    with pytest.raises(
        SparseRingError, match=rf"524288 tokens on 2 ranks need about {needed:.0f} bytes .*kept by layers"
    ) as caught:
        refuse_misfit(job, Schedule(), needed / 1.11)
    assert all(
        way in str(caught.value) for way in ("degree", "ZeRO", "layer_chunk_tokens", "offload.host_gib", "offload_optimizer")
    )
    with pytest.raises(SparseRingError, match="needs 19327352832 bytes .*host_gib to 18 or more"):
        refuse_misfit(replace(job, config=_offload(host_gib=10), tokens=262144), Schedule(), 999 * gib)
    outside = replace(job, config=_offload(host_gib=100), tokens=262144)
    host = memory_of(outside, Schedule()).host
    refuse_misfit(outside, Schedule(), None, host)
    with pytest.raises(SparseRingError, match=rf"need about {host:.0f} bytes .*host memory.*may have {host - 1:.0f} .*disk_path"):
        refuse_misfit(outside, Schedule(), None, host - 1)


def test_states_go_where_deepspeed_puts_them() -> None:
    ds = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}}
    job = replace(_job(4), **states_of(ds))
    here, moved = memory_of(replace(_job(4), zero_stage=3), Schedule()), memory_of(job, Schedule())
    weights = SHAPES["qwen2.5-3b"].parameters
    assert here.parts["states"] == 4 * weights and moved.parts["states"] == 0
    assert (moved.host, moved.disk) == (18 * weights / 4, 2 * weights / 4)
    small = replace(job, hardware=job.hardware.model_copy(update={"host_gib": 1.0}))
    assert "host memory: 12.9 of 1 GiB" in memory_of(small, Schedule()).misfits(small.hardware)[0]


def test_pages_save_buffers_on_the_device_and_cost_host_memory() -> None:
    job = replace(_job(4, 1 << 20, density=0.05), loss_tile=64)
    estimates = []
    for page in (None, 1 << 15, 1 << 20):
        config = _offload(host_gib=90, kv_page_tokens=page, layer_chunk_tokens=4096)
        estimates.append(estimate(replace(job, config=config), Schedule()))
    whole, paged, one_page = estimates
    kv_bytes = 2 * 2 * 128 * (1 << 18) * 2  # of a shard of a layer, bfloat16; gradients are twice as much
    assert paged.memory.host - whole.memory.host == kv_bytes
    saved = kv_bytes + (2 + 3 * 2) * kv_bytes - (3 + 3 * 2) * kv_bytes / 8
    assert whole.memory.device - paged.memory.device == pytest.approx(saved)
    assert whole.memory.device - one_page.memory.device == kv_bytes, "keys and values themselves"
    assert paged.step_ms == pytest.approx(whole.step_ms, rel=0.02)


def test_heads_that_ranks_share_are_exchanged_by_chunks_as_others_are_and_their_gradients_are_wider() -> None:
    def of(kv_heads: int, **section: Any) -> Estimate:
        job = _job(4, config=SparseRingConfig.model_validate({"selector": {"kind": "price"}, **section}), density=0.05)
        shape = job.model.model_copy(update={"num_key_value_heads": kv_heads})
        return estimate(replace(job, model=shape, loss_tile=256), Schedule(4))

    local, of_layer, more_weights = 131072 // 4, 131072 // 4 * 3 / 4 * 128, 2048 * 2 * 2 * 128
    for section, waited_for in (({}, 1.0), ({"layer_chunk_tokens": 8192}, 0.25)):
        own, shared = (of(kv_heads, **section) for kv_heads in (4, 2))
        assert own.heads_bytes == 36 * of_layer * 2 * 3 * (2 * 16 + 2 * 4)
        assert shared.heads_bytes - own.heads_bytes == 36 * of_layer * 2 * 2 * 4
        latency = 6 * load_hardware("h200").latency_ms
        expected = [latency + waited_for * e.heads_bytes / 36 / 300e6 for e in (own, shared)]
        assert [e.exchange_ms for e in (own, shared)] == pytest.approx(expected)

    def at_work(kv_heads: int, **offload: Any) -> float:
        section = {"layer_chunk_tokens": 1024, "offload": {"host_gib": 100, **offload}}
        return of(kv_heads, **section).memory.parts["one layer at work"]

    assert at_work(4) - at_work(2) == 4 * more_weights, "fullest is attention, and the sums of weights' gradients are smaller"
    whole_pages = local * 2 * 4 * 128 * 4
    assert at_work(4, kv_page_tokens=8192) - at_work(2, kv_page_tokens=8192) == 4 * more_weights - whole_pages


def test_what_is_sent_for_columns_depends_on_how_often_they_are_gathered() -> None:
    def of(**section: Any) -> Estimate:
        config = SparseRingConfig.model_validate(fixed(1000, 10) | section)
        return estimate(_job(4, config=config, density=0.05, columns=0.03), Schedule())

    columns = 16 * 8 * 1000  # of 16 patterns, each in 8 segments
    rows = -2 * 131072 * math.expm1(-columns / (2 * 131072))
    elements = 36 * 3 / 4 * 2 * 128 * rows
    assert of().columns_bytes == pytest.approx(elements * (2 * 2 + 4)), "forward, for the backward pass, and gradients"
    assert of(checkpoint="index").columns_bytes == pytest.approx(elements * (2 * 2 + 4)), "the replay attends"
    again = of(checkpoint="index", layer_chunk_tokens=16384, layer_inputs_every=2)
    assert again.columns_bytes == pytest.approx(elements * (2 * 2.5 + 4)), "every second layer runs a third time"


def test_columns_are_waited_for_only_beyond_the_hops_beside_them() -> None:
    def columns_ms(segment: int, share: float, gb_s: float, world: int = 2) -> float:
        job = _job(
            world, config=SparseRingConfig(selector={"kind": "price"}, segment_tokens=segment), density=0.03, columns=share
        )
        links = job.hardware.model_copy(update={"inner_gb_s": gb_s})
        return estimate(replace(job, hardware=links), Schedule()).columns_ms

    assert columns_ms(1024, 0.03, 300) == 0 < columns_ms(16384, 0.01, 20)
    assert columns_ms(1024, 0.03, 20, world=1) == columns_ms(1024, 0.0, 20) == 0
    # short segments have more columns, but the rows of two key/value heads that these can name come to an end
    many, more = columns_ms(2048, 0.01, 20), columns_ms(1024, 0.01, 20)
    assert 2 * columns_ms(16384, 0.01, 20) < many < more < 1.1 * many


def test_columns_take_no_more_than_a_part_of_them_and_parts_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(tokens: int, page: int | None = None) -> tuple[Job, Estimate]:
        config = SparseRingConfig.model_validate(
            {"segment_tokens": 1024, "layer_chunk_tokens": 4096, "heads_per_pattern": None}
            | {"selector": {"kind": "every_query"}, "offload": {"host_gib": 500, "kv_page_tokens": page}}
        )
        job = replace(_job(8, tokens, config, 0.05, 0.05), model=SHAPES["llama-3.1-8b"])
        return job, estimate(job, Schedule())

    def at_work(page: int | None) -> float:
        return of(1 << 19, page)[1].memory.parts["one layer at work"]

    (_, few), (job, many) = of(1 << 17), of(1 << 19)
    columns, column_bytes = columns_of(job, 32), 2 * 128 * (2 + 4)
    assert few.columns_ms == 0 < many.columns_ms and columns * column_bytes > 75 * 2**30
    assert many.memory.parts["tokens of columns"] == 32 * columns * 8, "the index is whole"
    parts, paged_parts = at_work(None), at_work(1 << 12)
    rows = 8 * (1 << 19)
    assert column_parts(job, 32) == 10
    monkeypatch.setattr(contract, "PART_BYTES", 1 << 40)
    whole, paged_whole = at_work(None), at_work(1 << 12)
    distinct = [-rows * math.expm1(-columns / x / rows) * 2 * 128 * 4 for x in (1, 10)]
    kv_bytes = 2 * 8 * 128 * 2 * (1 << 16)  # of a shard
    assert whole - parts == pytest.approx(0.9 * columns * column_bytes + distinct[0] - distinct[1] - 2 * kv_bytes)
    assert (parts - paged_parts) - (whole - paged_whole) == pytest.approx(-3 * kv_bytes), "keys, values and sums of all pages"


def test_the_help_of_plan_names_all_shapes_and_profiles() -> None:
    words = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "300"}).output.replace(",", " ").split()
    assert set(SHAPES) <= set(words)
    with pytest.raises(SparseRingError) as refused:
        load_hardware("no such profile")
    assert set(str(refused.value).split(" one of ")[1].split(", ")) <= set(words)


def test_the_plan_shows_what_is_offloaded_and_whether_it_fits(tmp_path: Path) -> None:
    outputs = []
    for gib in (80, 20):
        file = tmp_path / f"{gib}.json"
        file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "sparse_ring": {"offload": {"host_gib": gib}}}))
        command = ["plan", "--config", str(file), "--seq", "256K", "--world", "1", "--hardware", "h200"]
        outputs.append(" ".join(CliRunner().invoke(app, command).output.split()))
    assert all("host GiB" in output and "one layer at work" in output for output in outputs)
    assert "fastest that fits" in outputs[0]
    assert "no schedule fits the memory; sparse_ring.offload: the inputs of 36 checkpointed layers" in outputs[1]
    left = "Liger (--liger), layer_chunk_tokens, more room in offload, more GPUs (--world)."
    assert f"ways out: {left}" in outputs[1], "ZeRO-3 is the highest stage, and all ranks share the sequence already"
    command = ["plan", "--config", str(tmp_path / "20.json"), "--world", "1", "--max-seq"]
    output = " ".join(CliRunner().invoke(app, command).output.split())
    assert "143360 tokens (140K)" in output and "bound by: sparse_ring.offload: the inputs of 36" in output
    assert "attend again" in output
    refused = CliRunner().invoke(app, [*command, "--seq", "1M"])
    assert refused.exit_code == 1 and "leave out --seq" in refused.output
    section = {"offload": {"host_gib": 20}, "layer_chunk_tokens": 16384, "layer_inputs_every": 3}
    (tmp_path / "20.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "sparse_ring": section}))
    output = " ".join(CliRunner().invoke(app, command).output.split())
    assert "434176 tokens (424K)" in output and "the inputs of 12 checkpointed layers" in output
    assert "24 of 36 layers run forward once more" in output
