"""The log of a run, metrics.jsonl: its first line says what ran, so that a reader need not be told again."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.job import ModelShape


class MetricsLog:
    """A run's metrics.jsonl: one JSON object a line, each flushed at once."""

    NAME = "metrics.jsonl"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / self.NAME, "a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Write and flush one line."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class RunJob(BaseModel):
    """What ran: ``job`` of the line ``{"event": "start"}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelShape
    device: str
    """Name of a rank's GPU, or "cpu"."""
    world: int
    sequence_tokens: int
    micro_batch: int
    """Sequences that a ring works on at once."""
    accumulation: int
    """Micro-batches of a step."""
    zero_stage: int
    loss_tile_tokens: int
    """Tokens whose logits exist at once."""
    sparse_ring: dict[str, Any]
    """The section of the DeepSpeed file, with defaults."""


@dataclass(frozen=True)
class RunLog:
    """The last run in a log.

    Attributes:
        lines: of its logged steps; those of the dense warm-up are left out, and the first sparse one if there are others, since
            it compiles and its rate may be that of dense steps.
    """

    job: RunJob
    config: SparseRingConfig
    lines: Sequence[dict[str, Any]]

    def median(self, key: str) -> float | None:
        """Of the lines that have it; None if none has."""
        values = [line[key] for line in self.lines if line.get(key) is not None]
        return statistics.median(values) if values else None


def read_run(path: Path) -> RunLog:
    """Read what train/pretrain.py wrote.

    Raises:
        SparseRingError: no such file, another kind of file, or no step with measured attention.
    """
    lines = _lines(path)
    starts = [at for at, line in enumerate(lines) if line.get("event") == "start"]
    if not starts or "job" not in lines[starts[-1]]:
        raise SparseRingError(
            f'log: {path} has no line {{"event": "start", "job": ...}} that says what ran: give the metrics.jsonl that '
            "train/pretrain.py of this version writes into its output folder"
        )
    try:
        job = RunJob(**lines[starts[-1]]["job"])
        config = SparseRingConfig(**job.sparse_ring)
    except (ValidationError, SparseRingError, TypeError) as error:
        raise SparseRingError(f"log: {path} was written by another version of this package: {error}") from None
    steps = [line for line in lines[starts[-1] :] if "event" not in line and "attention_s" in line]
    sparse = [line for line in steps if line["step"] > config.dense_warmup_steps]
    if not sparse:
        found = "only steps of the dense warm-up" if steps else "no step with measured attention"
        raise SparseRingError(f"log: {path} has {found}: train for more steps; every sparse_ring.log_steps one is logged")
    return RunLog(job, config, sparse[1:] or sparse)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise SparseRingError(f"log: {path} cannot be read: {error.strerror}; give the metrics.jsonl of a run") from None
    except ValueError:  # no JSON, no text
        lines = [None]
    if not all(isinstance(line, dict) for line in lines):
        raise SparseRingError(f"log: {path} does not hold one JSON object a line: give the metrics.jsonl of a run")
    return lines
