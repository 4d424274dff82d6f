"""The log of a run, metrics.jsonl: its first line says what ran, so that a reader need not be told again."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.config_errors import list_problems
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.job import ModelShape
from ds_sparse_ring.select import AttentionMap


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

    def close(self) -> None:
        """No line follows."""
        self._file.close()


def log_of(run: Path) -> Path:
    """The metrics.jsonl of a run: in its output folder, or the file itself."""
    return run / MetricsLog.NAME if run.is_dir() else run


def has_steps(log: Path) -> bool:
    """Whether a metrics.jsonl holds more than starts: a run that has ended before its first logged step leaves only those."""
    return log.is_file() and any('"event": "start"' not in line for line in log.read_text(encoding="utf-8").splitlines())


def set_aside(folder: Path) -> Path | None:
    """Move the log of an earlier run in an output folder, and its maps, into ``folder``/earlier_N, which reads like that folder.

    Returns:
        Where they are; None if there was no run, or none that has made a step.
    """
    if not has_steps(folder / MetricsLog.NAME):
        return None
    goal = next(goal for number in itertools.count(1) if not (goal := folder / f"earlier_{number}").exists())
    goal.mkdir()
    for name in (MetricsLog.NAME, "maps"):
        if (folder / name).exists():
            (folder / name).rename(goal / name)
    return goal


def save_maps(folder: Path, step: int, maps: Mapping[int, Sequence[AttentionMap]]) -> None:
    """Write a step's attention maps, by layer, into ``folder``/maps; some 100 KB for six heads. The host waits for the device."""
    if not maps:
        return
    arrays: dict[str, Any] = {}
    for layer, of_layer in maps.items():
        for one in of_layer:
            name = f"layer{layer}_head{one.head}"
            arrays[name] = one.pooled.cpu().numpy().astype(np.float16)
            arrays[f"{name}_rows"] = one.rows.cpu().numpy()
            arrays[f"{name}_tokens_density"] = np.array([float(one.tokens), float(one.density)])
    path = folder / "maps" / f"step{step:08}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


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
    liger: bool = False
    """Norms, rotary embedding and gates by Liger's kernels."""
    sparse_ring: dict[str, Any]
    """The section of the DeepSpeed file, with defaults."""


@dataclass(frozen=True)
class RunHistory:
    """All lines of a run, over its resumes; of steps that were done twice the later ones.

    Attributes:
        start: the last line ``{"event": "start"}``, {} if there is none. training, evaluations: lines in order of their steps.
    """

    start: dict[str, Any]
    training: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]


def read_history(path: Path) -> RunHistory:
    """Read a metrics.jsonl as Trainer and train/pretrain.py write it.

    Raises:
        SparseRingError: no such file, another kind of file, or no logged step.
    """
    start: dict[str, Any] = {}
    kept: list[dict[str, Any]] = []
    for line in _lines(path):
        if line.get("event") == "start":
            start = line
            kept = [other for other in kept if other["step"] <= start.get("step", 0)]
        elif "step" in line and "loss" in line:
            kept.append(line)
    training = [line for line in kept if "event" not in line]
    if not training:
        raise SparseRingError(f"log: {path} has no logged step: train for more steps, every log_steps one has a line")
    return RunHistory(start, training, [line for line in kept if line.get("event") == "evaluation"])


def read_maps(folder: Path) -> dict[int, dict[tuple[int, int], HeadMapData]]:
    """Attention maps that a run has left in its output folder: by step, then by layer and head; {} if none.

    Raises:
        SparseRingError: a file that is no recording.
    """
    found: dict[int, dict[tuple[int, int], HeadMapData]] = {}
    for path in sorted((folder / "maps").glob("step*.npz")):
        try:
            with np.load(path) as arrays:
                found[int(path.stem.removeprefix("step"))] = {
                    (int(match[1]), int(match[2])): HeadMapData(
                        arrays[name].astype(np.float32), arrays[f"{name}_rows"], *arrays[f"{name}_tokens_density"].tolist()
                    )
                    for name in arrays.files
                    if (match := re.fullmatch(r"layer(\d+)_head(\d+)", name))
                }
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise SparseRingError(f"maps: {path} is no recording of attention ({error}): remove it") from None
    return found


class HeadMapData(NamedTuple):
    """A recorded `AttentionMap`: ``pooled`` ``[4, r, c]``, ``rows`` ``[r]``, on the host."""

    pooled: np.ndarray
    rows: np.ndarray
    tokens: float
    density: float


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

    def median_of_hop(self, direction: str, what: str, hop: int) -> float | None:
        """Of a hop's seconds; None if no line has that hop."""
        passes = [line["per_hop"][direction][what] for line in self.lines if "per_hop" in line]
        values = [of_hops[hop] for of_hops in passes if hop < len(of_hops)]
        return statistics.median(values) if values else None


def read_run(path: Path) -> RunLog:
    """Read what train/pretrain.py or Trainer wrote.

    Raises:
        SparseRingError: no such file, another kind of file, or no step with measured attention.
    """
    lines = _lines(path)
    starts = [at for at, line in enumerate(lines) if line.get("event") == "start"]
    if not starts or "job" not in lines[starts[-1]]:
        raise SparseRingError(
            f'log: {path} has no line {{"event": "start", "job": ...}} that says what ran: give the metrics.jsonl that '
            "train/pretrain.py or Trainer of this version write into their output folder"
        )
    try:
        job = RunJob(**lines[starts[-1]]["job"])
        config = SparseRingConfig(**job.sparse_ring)
    except (ValidationError, SparseRingError, TypeError) as error:
        what = list_problems(error) if isinstance(error, ValidationError) else error
        raise SparseRingError(
            f"log: {path} was written by another version of this package ({what}): read it with that one, or run again"
        ) from None
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
