"""Holds a density by moving the one price of selection.

The density of a layer's choice is a number on the device that nobody waits for. A step's numbers are summed over all ranks when
the next step begins, copied to the host beside its work, and read at the beginning of the step after: two steps after they were
measured, on every rank the same numbers in the same step, and long since there. From them follow

* the price: log price += gain * log(density / target), an integrator. Density falls about as price ** -a, and two steps of
  delay are stable up to gain * a = 1: with heavy-tailed masses (a below 2) the default gain moves without ringing. Where many
  masses are about equal, as in a model that has learnt nothing yet, a has no bound, and the density would jump over its target
  for ever: each time its error changes its sign the gain is halved, and grows again while it does not;
* a factor below 1 for layers under the floor, by the same rule, which returns to 1 once the one price is enough for them.

What is measured is the mean over patterns, sequences and layers that choose, as `Meter` reports it; dense layers, exploration
and steps that reuse an index do not count. Where the target is out of reach (local blocks and first tokens are more), the price
ends at its bound.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import PricedSelector
from ds_sparse_ring.index import Index, density
from ds_sparse_ring.streams import HostCopy

_LOWEST, _HIGHEST = 1e-9, 0.5
_CALMER, _BOLDER, _CALMEST = 0.5, 1.1, 1 / 32  # factors of the gain: when the error changes its sign, when not, the least
Row = tuple[int, float, float]
"""Layer, sum of its patterns' densities, and their number, over all calls and ranks of a step."""


class PriceController:
    """Prices of the layers, by the densities that they had. Every rank calls the same methods in the same steps."""

    def __init__(self, selector: PricedSelector, gain: float, floor: float | None, axes: Axes) -> None:
        """Begin with the selector's price; ``floor``: density below which no layer shall stay."""
        self._selector, self._log_price = selector, math.log(selector.price)
        self._log_factors: dict[int, float] = {}
        self._calm, self._last_error = 1.0, 0.0
        self._gain, self._floor, self._axes = gain, floor, axes
        self._running: dict[int, Tensor] = {}  # layer -> [sum, number], of the step that runs
        self._ended: _Rows | None = None  # of the last step, if they had to be summed before the next one began
        self._arriving: _Rows | None = None  # of the step before

    @property
    def price(self) -> float:
        """The one price."""
        return _rounded(self._log_price)

    def selector(self, layer: int | None = None) -> PricedSelector:
        """What a layer chooses by; None: one above the floor."""
        factor = 0.0 if layer is None else self._log_factors.get(layer, 0.0)
        return self._selector.model_copy(update={"price": _rounded(self._log_price + factor)})

    @property
    def lowered(self) -> list[int]:
        """Layers that have a price of their own."""
        return [layer for layer, factor in self._log_factors.items() if factor < 0]

    def record(self, layer: int, index: Index, *, chosen: bool) -> None:
        """Note what a layer reads; nothing counts that it has not ``chosen`` now. The host does not wait."""
        of_patterns = density(index)
        numbers = torch.stack([of_patterns.sum(), of_patterns.new_full((), float(index.patterns))]) * chosen
        # a layer that has reused is noted, too: every rank has the same layers
        self._running[layer] = self._running[layer] + numbers if layer in self._running else numbers

    def begin_step(self, target: float | None) -> None:
        """Move the prices by what the step before the last one had. Collective over the world.

        Args:
            target: density to hold; None: only the floor counts.
        """
        arrived, self._arriving = self._arriving, self._sum_up()
        self._ended = None
        if arrived is not None:
            self._move(arrived.read(), target)

    def _sum_up(self) -> _Rows | None:
        """Numbers of the step that has ended, over all ranks, on their way to the host."""
        if self._ended is not None or not self._running:
            return self._ended
        layers, self._running = sorted(self._running.items()), {}
        return _Rows([layer for layer, _ in layers], self._axes.world_sum(torch.stack([x for _, x in layers])))

    def _move(self, rows: list[Row], target: float | None) -> None:
        rows = [row for row in rows if row[2]]
        if not rows:
            return
        mean = sum(row[1] for row in rows) / sum(row[2] for row in rows)
        if target is not None:
            error = math.log(mean / target)
            jumped = error * self._last_error < 0
            self._calm = max(self._calm * _CALMER, _CALMEST) if jumped else min(self._calm * _BOLDER, 1.0)
            self._last_error = error
            moved = self._log_price + self._gain * self._calm * error
            self._log_price = min(max(moved, math.log(_LOWEST)), math.log(_HIGHEST))
        if self._floor is not None:
            for layer, total, count in rows:
                moved = self._log_factors.get(layer, 0.0) + self._gain * math.log(total / count / self._floor)
                self._log_factors[layer] = min(max(moved, math.log(_LOWEST) - self._log_price), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, between two steps, as JSON takes it. Collective over the world; the host waits."""
        self._ended = self._sum_up()
        return {
            "log_price": self._log_price,
            "calm": self._calm,
            "last_error": self._last_error,
            "log_factors": sorted(self._log_factors.items()),
            "ended": None if self._ended is None else self._ended.read(),
            "arriving": None if self._arriving is None else self._arriving.read(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that saved the state would have."""
        self._log_price = float(state["log_price"])
        self._calm, self._last_error = float(state["calm"]), float(state["last_error"])
        self._log_factors = {int(layer): float(factor) for layer, factor in state["log_factors"]}
        self._running = {}
        self._ended, self._arriving = (None if x is None else _Rows.of(x) for x in (state["ended"], state["arriving"]))


class _Rows:
    """Numbers of a step's layers that arrive on the host."""

    def __init__(self, layers: list[int], numbers: Tensor) -> None:
        """``numbers``: float64 ``[layers, 2]``, on the device or here."""
        self._layers, self._numbers = layers, HostCopy(numbers)

    @classmethod
    def of(cls, rows: list[Any]) -> _Rows:
        """From `read`, maybe by way of a file."""
        numbers = torch.tensor([row[1:] for row in rows], dtype=torch.float64).reshape(len(rows), 2)
        return cls([int(row[0]) for row in rows], numbers)

    def read(self) -> list[Row]:
        """The numbers; the host waits if they are still under way."""
        return [(layer, *numbers) for layer, numbers in zip(self._layers, self._numbers.get().tolist(), strict=True)]


def _rounded(log_price: float) -> float:
    """Six digits: hosts whose mathematical libraries differ in the last bit get the same price."""
    return float(f"{math.exp(log_price):.6g}")
