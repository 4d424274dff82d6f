"""One training run of a benchmark: the command that starts it, its figures, and those that are simulated before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.ds_configs import path as shipped
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.hardware import Hardware
from ds_sparse_ring.integrations.flops import PEAK_FLOPS, step_flops
from ds_sparse_ring.job import SHAPES, Job, Schedule, load_shape, schedules
from ds_sparse_ring.layout import LayoutKind
from ds_sparse_ring.memory import longest_sequence, memory_of
from ds_sparse_ring.plan_compare import measured_figures, simulated_figures
from ds_sparse_ring.run_log import MetricsLog, read_run
from ds_sparse_ring.train.packing import ROW_FEATURES
from ds_sparse_ring.train.rows import PackedData, Summary, save_prepared
from ds_sparse_ring.units import GIB

IndexKind = Literal["sparse", "dense"]

LOSS_TILE_TOKENS = 4096
ROOM = 0.93
"""Of a device's memory; CUDA, NCCL and fragments need the rest."""

_WORDS = 1024
_MODEL_TYPES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "llama": "llama"}


@dataclass(frozen=True)
class Training:
    """What all runs of a table have in common.

    Attributes:
        model: a named shape, or a folder with ``config.json``. hardware: what the simulator takes for a rank.
        columns, slashes: of a head and segment for 128K tokens, in proportion for others (`FixedSelector`).
        density, column_density: active share of the causal pairs that this makes, and the part of it that is columns.
        chunk_tokens: ``layer_chunk_tokens``. host_gib, device_gib: of ``offload``, where what layers keep does not fit.
        steps: of the optimizer; figures are medians over all but the first one. liger: its kernels.
    """

    model: str
    hardware: Hardware
    columns: int
    slashes: int
    density: float
    column_density: float
    segment_tokens: int
    chunk_tokens: int
    host_gib: float
    device_gib: float
    steps: int
    liger: bool


@dataclass(frozen=True)
class TrainingRun:
    """A run of `Training` on ``gpus`` ranks that share one sequence. ``offload``: whether what layers keep leaves the device."""

    training: Training
    gpus: int
    layout: LayoutKind
    index: IndexKind
    tokens: int
    schedule: Schedule = Schedule()
    offload: bool = False

    @property
    def name(self) -> str:
        """Also that of its folder."""
        return f"{self.gpus}gpu-{self.layout}-{self.index}-{self.tokens}"

    def section(self) -> dict[str, Any]:
        """``"sparse_ring"`` of the DeepSpeed file."""
        training, (ulysses, inner, kind) = self.training, self.schedule
        share = self.tokens / (128 << 10)
        fixed = {
            "kind": "fixed",
            "columns": max(1, round(training.columns * share)),
            "slashes": max(1, round(training.slashes * share)),
        }
        section: dict[str, Any] = {
            "layout": self.layout,
            "ulysses_degree": ulysses,
            "inner_degree": inner,
            "inner": kind,
            "selector": fixed if self.index == "sparse" else {"kind": "full"},
            "segment_tokens": training.segment_tokens,
            "layer_chunk_tokens": training.chunk_tokens or None,
            "log_steps": 1,
        }
        if self.offload:
            section["offload"] = {"host_gib": training.host_gib, "device_gib": training.device_gib}
        return section

    def job(self) -> Job:
        """For the simulator."""
        training = self.training
        shares = (training.density, training.column_density) if self.index == "sparse" else (1.0, 0.0)
        config = SparseRingConfig.model_validate(self.section())
        return Job(
            load_shape(training.model), training.hardware, config, self.tokens, self.gpus, *shares,
            loss_tile=LOSS_TILE_TOKENS, liger=training.liger,
        )  # fmt: skip

    def simulated(self) -> dict[str, float | None]:
        """Figures of a step before it runs, by the labels of `simulated_figures`, and of `rates`."""
        job = self.job()
        figures = simulated_figures(estimate(job, self.schedule))
        shape, peak = job.model, PEAK_FLOPS.get(job.hardware.name.split("-")[0].upper())
        words = shape.vocab_size * shape.hidden_size
        flops = step_flops(shape, shape.layer_parameters + words, self.tokens, job.density * self.tokens**2 / 2)
        mfu = None if peak is None else flops / (figures["step s"] * self.gpus * peak)
        return {**figures, "tokens/s": self.tokens / figures["step s"], "density": job.density, "MFU": mfu}

    def arguments(self, folder: Path, *, bf16: bool) -> list[str]:
        """Of train/pretrain.py; `prepare` writes the files."""
        training, own = self.training, folder / self.name
        named = training.model in SHAPES
        options: dict[str, Any] = {
            "--deepspeed": own / "deepspeed.json",
            "--fresh_config" if named else "--model": own / "model.json" if named else training.model,
            "--data": folder / f"rows{self.tokens}",
            "--output": own,
            "--steps": training.steps,
            "--bf16": bf16,
            "--loss_tile_tokens": LOSS_TILE_TOKENS,
            "--gradient_checkpointing": True,
            "--liger_kernel": training.liger,
            "--save_last": False,
        }
        if not named:
            options["--tokenizer"] = folder / f"rows{self.tokens}" / "tokenizer"
        return [str(part) for pair in options.items() for part in pair]

    def command(self, folder: Path, *, bf16: bool) -> list[str]:
        """What `launch` runs: one process a rank on this host."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.gpus)]
        return [sys.executable, *launcher, "-m", "ds_sparse_ring.train.pretrain", *self.arguments(folder, bf16=bf16)]

    def prepare(self, folder: Path) -> None:
        """Write the DeepSpeed file, the sizes of the model and, if no other run has, the rows; forget an earlier log."""
        own, rows = folder / self.name, folder / f"rows{self.tokens}"
        own.mkdir(parents=True, exist_ok=True)
        (own / MetricsLog.NAME).unlink(missing_ok=True)
        config = load_ds_json(shipped("zero3"))
        (own / "deepspeed.json").write_text(json.dumps({**config, "sparse_ring": self.section()}, indent=2))
        shape = load_shape(self.training.model)
        kind = _MODEL_TYPES.get(self.training.model.split("-")[0])
        (own / "model.json").write_text(json.dumps({"model_type": kind, **shape.model_dump(exclude_none=True)}))
        if not rows.exists():
            write_rows(rows, self.tokens, self.training.steps, min(_WORDS, shape.vocab_size))

    def launch(self, folder: Path, *, bf16: bool) -> str:
        """Train; ``train.log`` in the run's folder has what the ranks print. Returns "" or why there are no figures."""
        path = folder / self.name / "train.log"
        environment = os.environ if bf16 else {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        with open(path, "wb") as log:
            code = subprocess.run(self.command(folder, bf16=bf16), env=environment, stdout=log, stderr=log).returncode
        return "" if code == 0 else f"failed with exit code {code}: see {path}"

    def measured(self, folder: Path) -> dict[str, float | None]:
        """The figures of `simulated` from the run's log.

        Raises:
            SparseRingError: no log, or one without a step whose attention was measured.
        """
        run = read_run(folder / self.name / MetricsLog.NAME)
        rates = {"tokens/s": "tokens_per_s", "density": "density", "MFU": "mfu_executed"}
        return {**measured_figures(run), **{label: run.median(key) for label, key in rates.items()}}


def fitted(run: TrainingRun, *, fastest: bool = False) -> TrainingRun:
    """The run with a schedule and an offload that fit: nothing kept in host memory and a flat ring, if that does.

    Where a flat ring does not fit, or for ``fastest``, the fastest schedule that does; a flat ring with an offload if none fits.
    """
    for offload in (False, True)[: 2 if run.training.host_gib else 1]:
        tried = replace(run, offload=offload)
        job = tried.job()
        found = [s for s in dict.fromkeys([Schedule(), *schedules(job)]) if _fits(job, s)]
        if found:
            flat = found[0] == Schedule() and not fastest
            best = found[0] if flat else min(found, key=lambda s: estimate(job, s).step_ms)
            return replace(tried, schedule=best)
    return replace(run, offload=run.training.host_gib > 0)


def longest(run: TrainingRun) -> TrainingRun:
    """The run with as many tokens as are predicted to fit, and the schedule in which they do.

    Raises:
        SparseRingError: none fit.
    """
    training = run.training
    smaller = training.hardware.model_copy(update={"memory_gib": ROOM * training.hardware.memory_gib})
    job = replace(run, tokens=128 << 10, offload=training.host_gib > 0).job()
    shares = {"selector": {"kind": "price" if run.index == "sparse" else "full"}}  # columns then grow with the sequence
    config = SparseRingConfig.model_validate({**job.config.model_dump(), **shares})
    columns = 2 * training.columns / (128 << 10) if run.index == "sparse" else 0.0
    tokens, schedule, reasons = longest_sequence(replace(job, hardware=smaller, config=config, columns=columns))
    if schedule is None:
        raise SparseRingError(f"bench scaling: {training.model} on {run.gpus} GPUs: {'; '.join(reasons)}: use more GPUs")
    return replace(run, tokens=tokens, schedule=schedule, offload=training.host_gib > 0)


def write_rows(folder: Path, tokens: int, rows: int, words: int) -> None:
    """A prepared folder of ``rows`` rows, each one document of ``tokens`` random tokens out of ``words``, with a tokenizer."""
    ids = np.random.default_rng(0).integers(0, words, (rows, tokens), dtype=np.int32)
    columns = {"input_ids": list(ids), "position_ids": [np.arange(tokens, dtype=np.int32)] * rows}
    train = Dataset.from_dict(columns, features=ROW_FEATURES)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(words)}, unk_token="0")), pad_token="0"
    )
    summary = Summary(
        sequence_tokens=tokens, documents=rows, tokens=rows * tokens, longest=tokens, median=tokens, cut=0, rows=rows,
        evaluation_rows=0, padding=0.0, filled=1.0, vocabulary=len(tokenizer),
    )  # fmt: skip
    save_prepared(folder, PackedData(train, train.select(range(0)), tokens), summary, tokenizer)


def _fits(job: Job, schedule: Schedule) -> bool:
    memory = memory_of(job, schedule)
    return not memory.misfits(job.hardware) and memory.device <= ROOM * job.hardware.memory_gib * GIB
