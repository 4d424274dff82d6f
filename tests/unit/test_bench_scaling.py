"""The benchmark of scaling: what it runs trains on 1 and 2 ranks, predictions are the simulator's, failures are told."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import HfArgumentParser
from typer.testing import CliRunner

from ds_sparse_ring.bench.training_run import Training, TrainingRun, fitted, longest
from ds_sparse_ring.cli import app
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.job import Schedule
from ds_sparse_ring.memory import memory_of
from ds_sparse_ring.train.pretrain import PretrainArguments, Pretraining
from tests.common import DistributedTest

from .test_run_log import start, step, write

H200 = Training("qwen2.5-3b", load_hardware("h200"), 2600, 52, 0.055, 0.033, 16384, 16384, 112.0, 40.0, 4, liger=True)
SIZES = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _tiny(folder: Path) -> Training:
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(sizes))
    few: dict[str, Any] = {
        "columns": 4096,
        "slashes": 512,
        "segment_tokens": 128,
        "chunk_tokens": 64,
        "host_gib": 0.0,
        "steps": 2,
    }
    return replace(H200, model=str(folder), hardware=load_hardware("cpu"), liger=False, **few)


class TestARun(DistributedTest):
    world_size = [1, 2]

    @pytest.mark.parametrize("index", ["sparse", "dense"])
    def test_the_script_takes_what_the_command_gives_and_logs_every_figure(self, index: Any, tmp_path: Path) -> None:
        world = dist.get_world_size()
        training = _tiny(tmp_path) if dist.get_rank() == 0 else None
        run = fitted(TrainingRun(_shared(training), world, "zigzag", index, 512))
        if dist.get_rank() == 0:
            run.prepare(tmp_path)
        dist.barrier()
        arguments: Any = PretrainArguments
        (args,) = HfArgumentParser(arguments).parse_args_into_dataclasses(run.arguments(tmp_path, bf16=False))
        Pretraining(args).run()
        if dist.get_rank() == 0:
            figures = run.measured(tmp_path)
            assert set(figures) == set(run.simulated())
            of_gpus = {"MFU", "peak memory GiB"}
            assert all(figures[label] is not None for label in set(figures) - of_gpus), figures
            assert figures["density"] == 1 if index == "dense" else 0.3 < (figures["density"] or 0) < 0.95
            assert figures["tokens/s"] == pytest.approx(512 / (figures["step s"] or 0))
            assert not any((tmp_path / run.name / left).exists() for left in ("checkpoints", "model"))


def _shared(value: Any) -> Any:
    """Of rank 0."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def test_runs_without_room_go_to_host_memory_or_another_schedule() -> None:
    alone, pair = (fitted(TrainingRun(H200, gpus, "striped", "sparse", 512 << 10)) for gpus in (1, 2))
    assert (alone.offload, pair.offload) == (True, False) and alone.schedule == pair.schedule == Schedule()
    assert "offload" not in pair.section() and alone.section()["offload"] == {"host_gib": 112, "device_gib": 40}
    assert memory_of(alone.job(), alone.schedule).recomputed == 0
    llama = replace(H200, model="llama-3.1-8b", segment_tokens=65536, host_gib=200.0, device_gib=0.0)
    most = longest(TrainingRun(llama, 4, "striped", "sparse", 0))
    memory = memory_of(most.job(), most.schedule)
    assert most.tokens > 1 << 20 and not memory.misfits(llama.hardware) and memory.device < 0.95 * 139 * 2**30
    further = replace(most, tokens=2 * most.tokens)
    assert memory_of(further.job(), further.schedule).misfits(llama.hardware)
    tight = fitted(replace(most, tokens=5 << 19, schedule=Schedule()))
    assert tight.schedule != Schedule() and not memory_of(tight.job(), tight.schedule).misfits(llama.hardware)
    dense = TrainingRun(llama, 4, "striped", "dense", 2 << 20)
    ring, best = fitted(dense), fitted(dense, fastest=True)
    assert ring.schedule == Schedule() and best.schedule == Schedule(4), "one rank of a ring attends by flash-attn-4"
    assert estimate(best.job(), best.schedule).step_ms < estimate(ring.job(), ring.schedule).step_ms


def test_predictions_and_commands_without_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "scaling", "--dry-run", "--liger", "--gpus", "8,1", "--layouts", "striped,zigzag"])
    assert result.exit_code == 0, result.output
    rows = [line.split(" | ") for line in result.output.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows[1::2]] == ["1", "8", "8"] * 2, "layouts do not differ on one GPU"
    run = fitted(TrainingRun(H200, 8, "striped", "sparse", 512 << 10))
    e = estimate(run.job(), Schedule())
    of_eight = rows[3]
    assert of_eight[6:8] == [f"{e.step_ms / 1e3:.2f}", f"{(512 << 10) / e.step_ms * 1e3:.0f}"]
    alone = estimate(fitted(replace(run, gpus=1)).job(), Schedule())
    assert of_eight[14] == f"{alone.step_ms / e.step_ms:.2f}"
    commands = [line for line in result.output.splitlines() if "torch.distributed.run" in line]
    assert len(commands) == 6 and all("--bf16 True" in line for line in commands) and "--nproc_per_node 8" in commands[1]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(run: TrainingRun, *_: Any, **__: Any) -> list[str]:
        return [sys.executable, "-c", f"print('of', {run.gpus}); raise SystemExit({run.gpus - 1})"]

    def prepare(run: TrainingRun, folder: Path) -> None:
        (folder / run.name).mkdir(parents=True)
        write(folder / run.name, start(world=1), *(step(n, step_s=4.0, tokens_per_s=128.0) for n in (2, 3)))

    monkeypatch.setattr(TrainingRun, "command", command)
    monkeypatch.setattr(TrainingRun, "prepare", prepare)
    _tiny(tmp_path)
    options = f"--model {tmp_path} --hardware cpu --device cpu --tokens 512 --layouts striped --indexes sparse --gpus 2,1"
    result = CliRunner().invoke(app, ["bench", "scaling", *options.split(), "--output", str(tmp_path / "out")])
    assert result.exit_code == 1 and "2gpu-striped-sparse-512 failed" in result.output
    assert "failed with exit code 1" in result.output and "train.log" in result.output
    assert (tmp_path / "out" / "2gpu-striped-sparse-512" / "train.log").read_text() == "of 2\n"
    alone, pair = json.loads((tmp_path / "out" / "scaling.json").read_text())["runs"]
    assert alone["measured"]["step s"] == 4 and alone["measured"]["tokens/s"] == 128 and pair["measured"] is None
    error = f"{100 * (alone['simulated']['step s'] / 4 - 1):+.1f} %"
    assert any("| measured | 4.00 | 128 |" in line and f"{error} |" in line for line in result.output.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 1,two", "numbers of GPUs with commas"),
        ("--layouts stripes", "some of striped,contiguous,zigzag"),
        ("--indexes some", "some of sparse,dense"),
        ("--tokens many", "no number of tokens"),
        ("--tokens longest --model llama-3.1-70b --gpus 1", "use more GPUs"),
    ],
)
def test_what_cannot_be_run_is_refused(options: str, message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "scaling", "--dry-run", *options.split()])
    assert result.exit_code == 1 and message in result.output
