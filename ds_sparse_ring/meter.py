"""What a training loop reports about attention: density, recall and balance, per layer and over all ranks.

Layers record while the loop has the meter switched on; ``pop`` averages over micro-batches and reduces over the ring.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.comm import Axes


@dataclass
class _LayerSums:
    """Sums over the recorded calls of a layer: as small after a thousand calls as after one."""

    head_density: Tensor
    head_recall: Tensor
    calls: int = 0
    true_recall: dict[str, float] = field(default_factory=dict)


class Meter:
    """Collects what layers report, while ``active`` is set (equally on every rank of a ring: recall is collective)."""

    def __init__(self, axes: Axes) -> None:
        self.active = False
        self._axes = axes
        self._layers: dict[int, _LayerSums] = {}
        self._work = 0.0
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a part of the work while the meter is active: on the device, without waiting for it."""
        if not self.active:
            yield
            return
        begin = _now()
        yield
        self._spans.setdefault(name, []).append((begin, _now()))

    def record(
        self,
        layer: int,
        head_density: Tensor,
        head_recall: Tensor,
        local_pairs: float,
        true_recall: dict[str, float] | None = None,
    ) -> None:
        """Note one attention call.

        Args:
            head_density: active share of the causal triangle per pattern, ``[P]``.
            head_recall: attention mass kept on the probed rows per pattern, ``[P]``.
            local_pairs: active (query, key) pairs of this rank over all heads.
            true_recall: mean mass kept for early, middle and late queries and for the worst 5 %, if it was measured.
        """
        sums = self._layers.get(layer)
        if sums is None:
            sums = self._layers[layer] = _LayerSums(torch.zeros_like(head_density), torch.zeros_like(head_recall))
        sums.calls += 1
        sums.head_density += head_density
        sums.head_recall += head_recall
        for key, value in (true_recall or {}).items():
            sums.true_recall[key] = sums.true_recall.get(key, 0.0) + value
        self._work += local_pairs

    def pop(self) -> dict[str, Any]:
        """Everything since the last call; collective over all ranks. Empty without a recorded layer.

        Returns:
            ``density``, ``recall``: means over layers, patterns and sequences. ``imbalance``: active pairs of the busiest rank
            over the mean rank of its ring, the worst ring counts. ``per_layer``: a dict per layer with ``layer``, ``density``,
            ``recall``, ``head_density``, ``head_recall`` and, if measured, ``true_recall``. ``index_s``, ``attention_s``,
            ``report_s``: seconds of this rank for choosing the index, for attention (communication included) and for these
            metrics themselves.
        """
        spans, self._spans = self._spans, {}
        layers, self._layers = self._layers, {}
        work, self._work = self._work, 0.0
        imbalance = self._imbalance(work)
        if not layers:
            return {}
        per_layer = []
        for layer, sums in sorted(layers.items()):
            values = [float(sums.calls), *sums.head_density.tolist(), *sums.head_recall.tolist(), *sums.true_recall.values()]
            calls, *totals = self._axes.world_totals(values)
            means = [total / calls for total in totals]
            heads = sums.head_density.numel()
            density, recall = means[:heads], means[heads : 2 * heads]
            entry: dict[str, Any] = {
                "layer": layer,
                "density": sum(density) / heads,
                "recall": sum(recall) / heads,
                "head_density": density,
                "head_recall": recall,
            }
            if sums.true_recall:
                entry["true_recall"] = dict(zip(sums.true_recall, means[2 * heads :], strict=True))
            per_layer.append(entry)
        return {
            "density": sum(entry["density"] for entry in per_layer) / len(per_layer),
            "recall": sum(entry["recall"] for entry in per_layer) / len(per_layer),
            "imbalance": imbalance,
            **{f"{name}_s": sum(_seconds(begin, end) for begin, end in pairs) for name, pairs in spans.items()},
            "per_layer": per_layer,
        }

    def _imbalance(self, work: float) -> float:
        per_rank = [0.0] * self._axes.world_size
        per_rank[self._axes.rank] = work
        ring = self._axes.sequence_size
        totals = self._axes.world_totals(per_rank)
        rings = [totals[first : first + ring] for first in range(0, len(totals), ring)]
        return max(max(r) * ring / sum(r) if sum(r) > 0 else 1.0 for r in rings)


def _now() -> Any:
    if not torch.cuda.is_initialized():  # a run on the CPU, whatever the machine has
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
