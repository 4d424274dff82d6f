"""A run's log beside its simulation: what is read, what is compared, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.hardware import load_hardware, profile_of_device
from ds_sparse_ring.job import SHAPES, Job, Schedule
from ds_sparse_ring.plan_compare import hop_rows, job_of, rows
from ds_sparse_ring.run_log import RunJob, read_run

CONFIG = SparseRingConfig(dense_warmup_steps=1)


def start(**values: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "model": SHAPES["qwen2.5-3b"],
        "device": "NVIDIA H200",
        "world": 4,
        "sequence_tokens": 131072,
        "micro_batch": 1,
        "accumulation": 2,
        "zero_stage": 2,
        "loss_tile_tokens": 4096,
        "sparse_ring": CONFIG.model_dump(),
    }
    return {"event": "start", "step": 0, "steps": 4, "job": RunJob(**{**job, **values}).model_dump()}


def step(number: int, **values: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 1.0,
        "attention_s": 1.0,
        "density": 0.1,
        "column_density": 0.02,
        "causal_share": 0.5,
        **values,
    }


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_the_simulated_side_is_the_estimate_with_what_was_measured(tmp_path: Path) -> None:
    values = {"index_s": 0.25, "exposed_s": 0.1, "time_imbalance": 1.5, "hop_imbalance": 1.25, "sent_inner_bytes": 3 << 29}
    logged = [step(n, step_s=2.0 + n, **values) for n in (2, 3, 4, 5)]
    run = read_run(write(tmp_path, start(), *logged))
    job = job_of(run, "h200")
    expected = Job(SHAPES["qwen2.5-3b"], load_hardware("h200"), CONFIG, 131072, 4, 0.05, 0.01, zero_stage=2, loss_tile=4096)
    assert job == expected
    e = estimate(expected, Schedule())
    found: dict[str, Any] = {label: (measured, simulated) for label, measured, simulated in rows(run, e)}
    assert found["step s"] == (6.0, pytest.approx(2 * e.step_ms / 1e3)), "two micro-batches; the median of steps 3 to 5"
    assert found["rest s"] == (6.0 - 1.0 - 0.25, pytest.approx(2 * e.rest_ms / 1e3))
    assert found["index s"] == (0.25, pytest.approx(2 * e.layers * e.index_ms / 1e3))
    assert found["worker imbalance"] == (1.5, e.backward.imbalance)
    assert found["peak memory GiB"] == (None, e.memory.device / 2**30)
    assert found["sent inner GiB"] == (1.5, 2 * e.sent_bytes["sent_inner_bytes"] / 2**30)
    shard = 2 * 2 * 32768 * 128  # elements of keys and values; 3 go to the neighbour in each pass, and gradients all the way home
    assert e.sent_bytes["sent_inner_bytes"] == 36 * shard * (3 * 2 + 3 * 2 + 4 * 4)
    assert found["sent heads GiB"] == (None, 0.0) and found["sent columns GiB"][1] > 0
    parts = sum(found[label][1] for label in ("attention s", "index s", "rest s"))
    assert parts == pytest.approx(found["step s"][1])
    shown = CliRunner().invoke(app, ["plan", "--compare", str(tmp_path / "metrics.jsonl")])
    assert shown.exit_code == 0, shown.output
    assert f"{100 * (2 * e.step_ms / 1e3 / 6.0 - 1):+.1f} %" in shown.output and "steps, 3 to 5" in shown.output


def test_the_last_run_of_a_log_counts_and_dense_steps_do_not(tmp_path: Path) -> None:
    evaluation = {"event": "evaluation", "step": 2, "loss": 1.0, "attention_s": 9.0}
    run = read_run(write(tmp_path, start(world=8), step(7), start(), step(1), step(2), evaluation, {"step": 3, "loss": 1.0}))
    assert run.job.world == 4 and [line["step"] for line in run.lines] == [2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not an object"], "does not hold one JSON object a line"),
        ([{"event": "start", "step": 0}, step(5)], "no line .* that says what ran"),
        ([{"loss": 1.0}], "no line .* that says what ran"),
        ([start()], "no step with measured attention"),
        ([start(), step(1)], "only steps of the dense warm-up"),
        ([{"event": "start", "job": {"world": 2}}], "another version"),
        ([start(sparse_ring={"a_key_of_later": 1}), step(5)], "another version"),
    ],
)
def test_what_is_no_log_of_a_run_is_refused(lines: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match=message):
        read_run(write(tmp_path, *lines))


def test_other_files_and_idle_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match="cannot be read: No such file"):
        read_run(tmp_path / "nothing")
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(SparseRingError, match="does not hold one JSON object a line"):
        read_run(tmp_path / "picture")
    log = write(tmp_path, start(), step(5))
    refused = CliRunner().invoke(app, ["plan", "--compare", str(log), "--world", "4", "--seq", "1M"])
    assert refused.exit_code == 1 and "leave out --seq, --world" in refused.output
    write(tmp_path, start(device="TPU v5"), step(5))
    refused = CliRunner().invoke(app, ["plan", "--compare", str(log)])
    assert refused.exit_code == 1 and "for which there is no profile: give --hardware" in refused.output


def test_profiles_are_found_by_the_name_of_a_device() -> None:
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "cpu", "NVIDIA L4")
    assert [profile_of_device(name) for name in names] == ["h200", "h100", "a100-40gb", "a100-80gb", "cpu", None]


def test_hops_stand_beside_the_simulated_ones(tmp_path: Path) -> None:
    per_hop = {name: {"compute_s": [0.4, 0.3, 0.2, 0.1], "wait_s": [0.0, 0.01, 0.0, 0.0]} for name in ("forward", "backward")}
    run = read_run(write(tmp_path, start(), *(step(n, per_hop=per_hop, head_imbalance=1.5) for n in (2, 3))))
    e = estimate(job_of(run, "h200"), Schedule())
    found = hop_rows(run, e)
    assert [(row[0], row[2]) for row in found] == [(0.4, 0.0), (0.3, 0.01), (0.2, 0.0), (0.1, 0.0)]
    assert [sum(row[i] or 0.0 for row in found) for i in (1, 4)] == [
        pytest.approx(2 * e.layers * one.compute / 1e3) for one in (e.forward, e.backward)
    ]
    shown = CliRunner().invoke(app, ["plan", "--compare", str(tmp_path / "metrics.jsonl")]).output
    assert "0.300" in shown and "1.500 times the mean one's pairs" in shown
