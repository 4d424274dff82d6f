"""What a training loop reports about attention: density, recall and balance, per layer and over all ranks.

Layers record while the loop has the meter switched on; ``pop`` averages over micro-batches and reduces over the ring.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.comm import Axes


@dataclass
class _LayerRecord:
    density: list[float] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    head_density: list[Tensor] = field(default_factory=list)
    head_recall: list[Tensor] = field(default_factory=list)
    true_recall: list[dict[str, float]] = field(default_factory=list)


class Meter:
    """Collects what layers report. ``active`` must have the same value on every rank of a ring (recall is collective)."""

    def __init__(self, axes: Axes) -> None:
        self.active = True
        self._axes = axes
        self._layers: dict[int, _LayerRecord] = defaultdict(_LayerRecord)
        self._work = 0.0

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
        record = self._layers[layer]
        record.density.append(float(head_density.mean()))
        record.recall.append(float(head_recall.mean()))
        record.head_density.append(head_density)
        record.head_recall.append(head_recall)
        if true_recall is not None:
            record.true_recall.append(true_recall)
        self._work += local_pairs

    def pop(self) -> dict[str, Any]:
        """Everything since the last call; collective over all ranks. Empty without a recorded layer.

        Returns:
            ``density``, ``recall``: means over layers and sequences. ``imbalance``: active pairs of the busiest rank over the
            mean rank of its ring, the worst ring counts. ``per_layer``: a dict per layer with ``layer``, ``density``,
            ``recall``, ``head_density``, ``head_recall`` and, if measured, ``true_recall``.
        """
        layers, self._layers = self._layers, defaultdict(_LayerRecord)
        work, self._work = self._work, 0.0
        imbalance = self._imbalance(work)
        if not layers:
            return {}
        per_layer = []
        for layer, record in sorted(layers.items()):
            entry: dict[str, Any] = {
                "layer": layer,
                "density": self._mean(record.density),
                "recall": self._mean(record.recall),
                "head_density": torch.stack(record.head_density).mean(0).tolist(),
                "head_recall": torch.stack(record.head_recall).mean(0).tolist(),
            }
            if record.true_recall:
                keys = record.true_recall[0]
                entry["true_recall"] = {key: self._mean([r[key] for r in record.true_recall]) for key in keys}
            per_layer.append(entry)
        return {
            "density": sum(entry["density"] for entry in per_layer) / len(per_layer),
            "recall": sum(entry["recall"] for entry in per_layer) / len(per_layer),
            "imbalance": imbalance,
            "per_layer": per_layer,
        }

    def _mean(self, values: list[float]) -> float:
        total, count = self._axes.world_totals([sum(values), float(len(values))])
        return total / count

    def _imbalance(self, work: float) -> float:
        per_rank = [0.0] * self._axes.world_size
        per_rank[self._axes.rank] = work
        ring = self._axes.ring_size
        totals = self._axes.world_totals(per_rank)
        rings = [totals[first : first + ring] for first in range(0, len(totals), ring)]
        return max(max(r) * ring / sum(r) if sum(r) > 0 else 1.0 for r in rings)
