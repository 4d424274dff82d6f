"""Whether a checkpoint can be resumed on the ranks there are: a note beside it says what it was made on.

DeepSpeed's files belong to a number of ranks, and a run finds its place in the data by counting steps, which is right only if a
step takes as many rows as before. The ranks may be divided otherwise: two rings with two rows each take what one ring takes
with four accumulation steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.runtime import SparseRing

_FILE = "sparse_ring.json"


@dataclass(frozen=True)
class StepShape:
    """What a step runs on. ``rows``: of all rings and accumulation steps."""

    world: int
    sequence_ranks: int
    rows: int

    @classmethod
    def of(cls, ring: SparseRing, *, micro_batch: int, accumulation: int) -> StepShape:
        """That of a run."""
        axes = ring.axes
        return cls(axes.world_size, axes.sequence_size, micro_batch * accumulation * axes.data_size)

    def save(self, folder: str | Path) -> None:
        """Write the note into a checkpoint's folder; for one rank."""
        (Path(folder) / _FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    def check(self, folder: str | Path, ds: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that would not go on where it was; one without a note is taken as it is.

        Args:
            ds: DeepSpeed's configuration, {} without it; with ``"checkpoint": {"load_universal": true}`` any number of ranks.

        Raises:
            SparseRingError: naming both numbers and the way out.
        """
        file = Path(folder) / _FILE
        if not file.is_file():
            return
        saved = StepShape(**json.loads(file.read_text(encoding="utf-8")))
        if saved.world != self.world and not (ds.get("checkpoint") or {}).get("load_universal"):
            raise SparseRingError(
                f"resume: {folder} was written by {saved.world} ranks, here are {self.world}, and DeepSpeed's optimizer states "
                "belong to a number of ranks: start as many, or begin a new run from the saved weights"
            )
        if saved.rows != self.rows:
            as_saved = f", or resume with degree = {saved.sequence_ranks} as saved" * (
                saved.sequence_ranks != self.sequence_ranks
            )
            raise SparseRingError(
                f"resume: {folder} was written with {saved.rows} rows a step ({saved.world} ranks, {saved.sequence_ranks} share "
                f"a sequence), here are {self.rows} ({self.sequence_ranks} share one), so rows would be skipped or repeated: "
                f"change accumulation steps or micro-batch so that a step takes as many{as_saved}"
            )
