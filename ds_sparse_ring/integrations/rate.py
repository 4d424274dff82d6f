"""How much is done a second, as both training scripts report it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.integrations.flops import matrix_parameters, utilisation
from ds_sparse_ring.integrations.memory import memory_peaks
from ds_sparse_ring.runtime import SparseRing


class Work(NamedTuple):
    """What a ring has worked on: tokens, (query, key) pairs inside documents per head, wall seconds."""

    tokens: int
    causal_pairs: int
    seconds: float


class WorkRate:
    """Counts tokens and pairs over wall time; evaluation and checkpoints can be left out of it."""

    def __init__(self) -> None:
        self._tokens = self._pairs = 0
        self._begin_s = time.perf_counter()

    def add(self, sequence: Sequence) -> None:
        """Count a micro-batch as the data has it: before sharding, without padding."""
        self._tokens += sequence.tokens
        self._pairs += sequence.causal_pairs

    def pop(self) -> Work:
        """What was done since the last call."""
        now_s = time.perf_counter()
        done = Work(self._tokens, self._pairs, max(now_s - self._begin_s, 1e-9))
        self._tokens = self._pairs = 0
        self._begin_s = now_s
        return done

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still."""
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._begin_s += time.perf_counter() - begin_s


def work_figures(done: Work, steps: int, metrics: Mapping[str, Any], model: nn.Module, ring: SparseRing) -> dict[str, float]:
    """Rates and memory of the steps since the last line. Collective over all ranks.

    Args:
        done: by this rank's ring. metrics: of `Meter.pop`; what measuring took is no part of training.
        model: with a configuration of Transformers, without wrappers.

    Returns:
        ``tokens_per_s`` of all ranks; ``step_s``; ``mfu_executed``, ``mfu_dense_equivalent`` of `utilisation`, where the device's
        peak is known; what `memory_peaks` gives.
    """
    axes = ring.axes
    seconds = max(done.seconds - metrics.get("report_s", 0.0), 1e-9)
    tokens, pairs = (total / axes.sequence_size for total in axes.world_totals([float(done.tokens), float(done.causal_pairs)]))
    mfu = {}
    if "density" in metrics:
        # densities count inside documents, as pairs do
        config, parameters, rank_seconds = model.config, matrix_parameters(model), seconds * axes.world_size
        mfu = utilisation(config, parameters, round(tokens), pairs, metrics["density"], rank_seconds)
    return {"tokens_per_s": tokens / seconds, "step_s": seconds / max(steps, 1), **mfu, **memory_peaks(ring)}
