"""What layers choose by in each step of a run: warm-up, dense layers, curriculum, prices, reuse, exploration.

Everything follows from the optimizer step, the configuration and densities that all ranks have summed up together: the same on
every rank in the same step. Steps of the curriculum, of refreshes and of exploration are counted from the end of the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import FullSelector, PricedSelector, ScheduleConfig, Selector, SparseRingConfig
from ds_sparse_ring.config_schedule import between, number_between
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import Index
from ds_sparse_ring.layer_names import resolve_layers
from ds_sparse_ring.price_controller import PriceController
from ds_sparse_ring.reuse import IndexReuse


@dataclass(frozen=True)
class Step:
    """What one step's micro-batches choose by.

    Attributes:
        number: optimizer steps done before.
        selector: of layers that ``of_layers`` does not name.
        refreshes: layers choose even if they have kept an index. keeps_columns: what they keep is the whole index.
        explore: random diagonals of a segment and pattern beside what is chosen; 0: none in this step.
    """

    number: int
    selector: Selector
    of_layers: Mapping[int, Selector] = field(default_factory=dict)
    controller: PriceController | None = None
    reuse: IndexReuse | None = None
    refreshes: bool = True
    keeps_columns: bool = False
    explore: int = 0

    def selector_of(self, layer: int) -> Selector:
        """What the layer chooses by."""
        return self.of_layers.get(layer, self.selector)

    def kept(self, layer: int, segments: tuple[Segment, ...], patterns: int) -> Index | None:
        """What the layer reads again; None: it has to choose."""
        if self.reuse is None or self.refreshes:
            return None
        return self.reuse.find(layer, segments, patterns)


class Schedule:
    """The schedule of a run; one for each `SparseRing`.

    Attributes:
        controller: moves prices; None without ``target_density`` and ``min_layer_density``.
    """

    def __init__(self, config: SparseRingConfig, axes: Axes) -> None:
        """Of a configuration; communicates over ``axes`` only if there is a controller."""
        self._config = config
        self._schedule = schedule = config.schedule or ScheduleConfig()
        self._dense: frozenset[int] | None = None
        self._reuse = IndexReuse() if schedule.refresh_steps > 1 else None
        self.controller: PriceController | None = None
        if schedule.target_density is not None or schedule.min_layer_density is not None:
            assert isinstance(config.selector, PricedSelector)
            self.controller = PriceController(config.selector, schedule.gain, schedule.min_layer_density, axes)
        self._begun: int | None = None
        self._made: Step | None = None

    def name_layers(self, names: Mapping[str, int]) -> None:
        """Tell the names of the model's attention modules and their layers, so that ``dense_layers`` can name them.

        Raises:
            SparseRingError: ``dense_layers`` names a layer that there is not.
        """
        self._dense, self._made = resolve_layers(self._config.dense_layers, names), None

    def training(self, number: int) -> Step:
        """What a step of training chooses by. With a controller its first call in each step is collective over the world.

        Raises:
            SparseRingError: ``dense_layers`` names layers of a model that is not known.
        """
        if self._begun != number:
            self._begun, self._made = number, None
            if self.controller is not None:
                self.controller.begin_step(self._target(number))
        if self._made is None:
            self._made = self._make(number)
        return self._made

    def evaluation(self, number: int) -> Step:
        """What an evaluation after ``number`` steps chooses by: as training, but for warm-up, reuse and exploration."""
        return Step(number, FullSelector()) if self._config.eval_full_index else self._plain(number)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same way; collective over the world, between two steps."""
        return {} if self.controller is None else {"controller": self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; one of a run without a controller leaves the prices where they are."""
        self._begun = self._made = None
        if self.controller is not None and "controller" in state:
            self.controller.load_state_dict(state["controller"])

    def _make(self, number: int) -> Step:
        after = number - self._config.dense_warmup_steps
        if after < 0:
            return Step(number, FullSelector())
        plain, schedule = self._plain(number), self._schedule
        return Step(
            number,
            plain.selector,
            plain.of_layers,
            controller=self.controller,
            reuse=self._reuse,
            refreshes=after % schedule.refresh_steps == 0,
            keeps_columns=schedule.reuse == "index",
            explore=schedule.explore_diagonals if after % schedule.explore_steps == 0 else 0,
        )

    def _plain(self, number: int) -> Step:
        """Selectors alone."""
        of_layers: dict[int, Selector] = {}
        selector: Selector = self._config.selector
        if self.controller is not None:
            selector = self.controller.selector()
            of_layers = {layer: self.controller.selector(layer) for layer in self.controller.lowered}
        elif self._schedule.start_selector is not None:
            selector = between(self._schedule.start_selector, selector, self._share(number))
        for layer in self._dense_layers():
            of_layers[layer] = FullSelector()
        return Step(number, selector, of_layers)

    def _dense_layers(self) -> frozenset[int]:
        if self._dense is None:
            self._dense = resolve_layers(self._config.dense_layers, None)
        return self._dense

    def _share(self, number: int) -> float:
        """Share of the curriculum that has passed."""
        after, steps = number - self._config.dense_warmup_steps, self._schedule.curriculum_steps
        return min(max(after / steps, 0.0), 1.0) if steps else 1.0

    def _target(self, number: int) -> float | None:
        start, target = self._schedule.start_density, self._schedule.target_density
        return target if start is None or target is None else number_between(start, target, self._share(number))
