"""What a training loop reports about attention: density, recall and balance, times and bytes, per layer and over all ranks.

Layers record while the loop has the meter switched on; ``pop`` averages over micro-batches and reduces over the ring. Times
are those of the device and taken without waiting for it (`stopwatch`); they are read in ``pop``.

*Imbalance* is the largest over the mean, 1 at best. In pairs it is what the index asks of ranks and heads; in time it is what
they took. One launch works on all heads, so heads have no time of their own.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import MapsConfig
from ds_sparse_ring.stopwatch import Stopwatch

if TYPE_CHECKING:
    from ds_sparse_ring.select import AttentionMap


SENT = ("sent_inner_bytes", "sent_outer_bytes", "sent_heads_bytes", "sent_columns_bytes")
"""Counts of what leaves a rank."""


class HopPart(NamedTuple):
    """A part of one hop of one layer's pass: its kernels, or the wait for what arrives."""

    backward: bool
    layer: int
    hop: int
    what: Literal["compute", "wait"]


@dataclass
class _LayerSums:
    """Sums over the recorded calls of a layer: as small after a thousand calls as after one."""

    head_density: Tensor
    head_recall: Tensor
    head_columns: Tensor
    calls: int = 0
    true_recall: dict[str, float] = field(default_factory=dict)


class Meter:
    """Collects what layers report, while ``active`` is set (equally on every rank of a ring: recall is collective).

    Args:
        maps: which attention maps to record, if any.

    Attributes:
        notes: numbers that hold for the whole of a step, which the next report repeats.
        model_layers: of the model, if known; ``maps`` without layers of their own follow it.
    """

    def __init__(self, axes: Axes, maps: MapsConfig | None = None) -> None:
        self.active = False
        self.notes: dict[str, float] = {}
        self.model_layers: int | None = None
        self._axes, self._maps_config, self._reports = axes, maps, 0
        self._maps: defaultdict[int, list[AttentionMap]] = defaultdict(list)
        self._layers: dict[int, _LayerSums] = {}
        self._stopwatch: Stopwatch[str | HopPart] = Stopwatch()
        self._counts: defaultdict[str, float] = defaultdict(float)

    @property
    def own_s(self) -> float:
        """Host seconds that taking times took so far."""
        return self._stopwatch.own_s

    def timed(self, name: str | HopPart) -> AbstractContextManager[None]:
        """Time a part of the work while the meter is active: on the device, without waiting for it."""
        return self._stopwatch.timed(name) if self.active else nullcontext()

    def count(self, name: str, amount: float) -> None:
        """Add to one of this rank's counts while the meter is active."""
        if self.active:
            self._counts[name] += amount

    def record(
        self,
        layer: int,
        head_density: Tensor,
        head_recall: Tensor,
        head_columns: Tensor,
        local_pairs: float,
        true_recall: dict[str, float] | None = None,
    ) -> None:
        """Note one attention call.

        Args:
            head_density: active share of the causal triangle per pattern, ``[P]``; head_columns: the part that are columns.
            head_recall: attention mass kept on the probed rows per pattern, ``[P]``.
            local_pairs: active (query, key) pairs of this rank over all heads.
            true_recall: mean mass kept for early, middle and late queries and for the worst 5 %, if it was measured.
        """
        sums = self._layers.get(layer)
        if sums is None:
            sums = self._layers[layer] = _LayerSums(*torch.zeros(3, head_density.numel(), dtype=torch.float64))
        sums.calls += 1
        sums.head_density += head_density
        sums.head_recall += head_recall
        sums.head_columns += head_columns
        for key, value in (true_recall or {}).items():
            sums.true_recall[key] = sums.true_recall.get(key, 0.0) + value
        self.count("pairs", local_pairs)

    def maps_due(self, layer: int, heads: int) -> list[int]:
        """Of ``heads`` query heads of a layer, those whose attention maps are wanted now: of one call in a report, if any."""
        wanted = self._maps_config
        if wanted is None or self._reports % wanted.every or layer in self._maps:
            return []
        last = (self.model_layers or 1) - 1
        layers = [0, last // 2, last] if wanted.layers is None else wanted.layers
        of_layer = [0, heads // 2] if wanted.heads is None else wanted.heads
        return sorted({head for head in of_layer if head < heads}) if layer in layers else []

    def record_map(self, layer: int, head_map: AttentionMap) -> None:
        """Keep a map of a layer, on the device, until the report."""
        self._maps[layer].append(head_map)

    def pop_maps(self) -> dict[int, list[AttentionMap]]:
        """Maps by layer since the last call."""
        maps, self._maps = dict(self._maps), defaultdict(list)
        return maps

    def pop(self) -> dict[str, Any]:
        """Everything since the last call; collective over all ranks. Empty without a recorded layer.

        Returns:
            Of the index: ``density``, ``recall``, ``column_density`` (the part of the density that are columns): means over
            layers, patterns and sequences. With ``true_recall_rows`` ``recall_early``, ``recall_middle``, ``recall_late`` (thirds
            of the stream) and ``recall_worst`` (5 % of all queries), too. ``pair_imbalance``: active pairs of the busiest rank
            over the mean rank of its ring, the worst ring counts. ``head_imbalance``: active pairs of the busiest pattern over
            the mean one, mean over layers.
            ``per_layer``: a dict per layer with ``layer``, the first three, ``head_density``, ``head_recall`` and, if measured,
            ``true_recall``. ``price``: the one price, of a selection by price.

            Of this rank, seconds: ``index_s`` for choosing the index, ``attention_s`` for attention (communication included),
            ``report_s`` for these metrics themselves, ``copy_wait_s`` standing still for tensors that were offloaded. Of all
            ranks: see `_times`.
        """
        seconds, counts, layers = self._stopwatch.pop(), self._counts, self._layers
        self._counts, self._layers = defaultdict(float), {}
        pairs = [row[0] for row in self._axes.world_rows([counts["pairs"]])]
        if not layers:
            return {}
        self._reports += 1
        per_layer = [self._of_layer(layer, sums) for layer, sums in sorted(layers.items())]
        return {
            **{key: _mean([entry[key] for entry in per_layer]) for key in ("density", "recall", "column_density")},
            **_true_recall(per_layer),
            "pair_imbalance": self._worst_ring(pairs),
            "head_imbalance": _mean([_imbalance(entry["head_density"]) for entry in per_layer]),
            **{f"{name}_s": seconds.get(name, 0.0) for name in ("index", "attention", "report", "copy_wait")},
            **self._times(seconds, counts),
            **self.notes,
            "per_layer": per_layer,
        }

    def _of_layer(self, layer: int, sums: _LayerSums) -> dict[str, Any]:
        of_heads = torch.cat([sums.head_density, sums.head_recall, sums.head_columns]).tolist()
        calls, *totals = self._axes.world_totals([float(sums.calls), *of_heads, *sums.true_recall.values()])
        means, heads = [total / calls for total in totals], sums.head_density.numel()
        density, recall, columns = (means[at : at + heads] for at in range(0, 3 * heads, heads))
        entry: dict[str, Any] = {
            "layer": layer,
            "density": _mean(density),
            "recall": _mean(recall),
            "column_density": _mean(columns),
            "head_density": density,
            "head_recall": recall,
        }
        if sums.true_recall:
            entry["true_recall"] = dict(zip(sums.true_recall, means[3 * heads :], strict=True))
        return entry

    def _times(self, seconds: dict[str | HopPart, float], counts: dict[str, float]) -> dict[str, Any]:
        """Times and bytes of the ring, forward and backward; collective.

        Returns:
            Means over ranks: ``compute_s``, attention's kernels; ``exposed_s``, what attention stood still for: ``ring_wait_s``
            for the ring's transfers, ``columns_s`` for columns and their gradients, ``heads_s`` for the exchange within
            Ulysses groups (waiting for a rank that comes late is in them, too); ``sent_inner_bytes``, ``sent_outer_bytes`` to
            neighbours in the ring and to other inner rings, ``sent_heads_bytes`` within Ulysses groups, ``sent_columns_bytes``
            for columns and their gradients (both as `Arrival` counts them); ``host_us_per_hop``, the host's time for a turn of
            the loop, without that for taking times (on a CPU the kernels and waits are part of it). ``exposed``: exposed_s as a
            share of attention's time.

            ``time_imbalance``: compute time of the busiest rank over the mean rank of its ring, the worst ring counts.
            ``hop_imbalance``: the same of single hops, mean over layers, passes, hops and rings, as `simulate` has it.
            ``per_hop``: for ``forward`` and ``backward`` ``compute_s`` and ``wait_s`` of each hop: sums over layers, means over
            ranks.
        """
        parts = {key: value for key, value in seconds.items() if isinstance(key, HopPart)}
        computing = sorted(key for key in parts if key.what == "compute")
        largest, mean = self._axes.ring_largest_and_mean([parts[key] for key in computing])
        ratios = [a / b for a, b in zip(largest, mean, strict=True) if b > 0]
        sums = {
            "compute_s": sum(value for key, value in parts.items() if key.what == "compute"),
            "ring_wait_s": sum(value for key, value in parts.items() if key.what == "wait"),
            **{f"{name}_s": seconds.get(name, 0.0) for name in ("columns", "heads", "attention")},
            **{name: counts.get(name, 0.0) for name in (*SENT, "host_s", "hops")},
            "hop_imbalance": _mean(ratios) if ratios else 1.0,
        }
        of_ranks = [dict(zip(sums, row, strict=True)) for row in self._axes.world_rows(list(sums.values()))]
        means = {name: _mean([of_rank[name] for of_rank in of_ranks]) for name in sums}
        attention_s, host_s, hops = (means.pop(name) for name in ("attention_s", "host_s", "hops"))
        exposed_s = means["ring_wait_s"] + means["columns_s"] + means["heads_s"]
        return {
            **means,
            "exposed_s": exposed_s,
            "exposed": exposed_s / attention_s if attention_s > 0 else 0.0,
            "time_imbalance": self._worst_ring([of_rank["compute_s"] for of_rank in of_ranks]),
            **({"host_us_per_hop": 1e6 * host_s / hops} if hops else {}),
            "per_hop": self._per_hop(parts),
        }

    def _per_hop(self, parts: dict[HopPart, float]) -> dict[str, dict[str, list[float]]]:
        hops = 1 + max((key.hop for key in parts), default=-1)
        sums = torch.zeros(2, 2, hops, dtype=torch.float64)
        for (backward, _, hop, what), value in parts.items():
            sums[int(backward), int(what == "wait"), hop] += value
        means = (torch.tensor(self._axes.world_totals(sums.flatten().tolist())) / self._axes.world_size).view(2, 2, hops)
        by_pass = zip(("forward", "backward"), means.tolist(), strict=True)
        return {name: {"compute_s": compute, "wait_s": wait} for name, (compute, wait) in by_pass}

    def _worst_ring(self, of_ranks: list[float]) -> float:
        size = self._axes.sequence_size
        return max(_imbalance(of_ranks[first : first + size]) for first in range(0, len(of_ranks), size))


def _true_recall(per_layer: list[dict[str, Any]]) -> dict[str, float]:
    """Means over layers, if it was measured: in dense steps it is not."""
    measured = [entry["true_recall"] for entry in per_layer if "true_recall" in entry]
    parts = ("early", "middle", "late", "worst") if measured else ()
    return {f"recall_{part}": _mean([of_layer[part] for of_layer in measured]) for part in parts}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _imbalance(values: list[float]) -> float:
    """Largest over mean; 1 where there is nothing."""
    mean = _mean(values)
    return max(values) / mean if mean > 0 else 1.0
