"""Whether a checkpoint can be resumed on the ranks there are: a note beside it says what it was made on.

A run finds its place in the data by counting steps, which is right only if a step takes as many rows as before. The ranks may be
divided otherwise: two rings with two rows each take what one ring takes with four accumulation steps. Another number of ranks
cannot read the optimizer states that ZeRO has partitioned, until DeepSpeed's own tool has converted them to a form that any
number reads ("universal"), in a folder of its own beside the checkpoint's.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

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

    def check(self, folder: str | Path, ds: Mapping[str, Any], root: str | Path | None = None) -> bool:
        """Refuse a checkpoint that would not go on where it was; one without a note is taken as it is.

        Args:
            folder: where the note is.
            ds: DeepSpeed's configuration, {} without it.
            root: the folder that is given to ``engine.load_checkpoint``, if it is another one.

        Returns:
            Whether DeepSpeed has to read the converted form: `set_universal`.

        Raises:
            SparseRingError: naming both numbers and the way out.
        """
        file, asked = Path(folder) / _FILE, bool((ds.get("checkpoint") or {}).get("load_universal"))
        if not file.is_file():
            return asked
        saved = StepShape(**json.loads(file.read_text(encoding="utf-8")))
        self._check_rows(saved, folder)
        states = _States.of(Path(folder if root is None else root))
        if states is None or not states.files:
            return False  # of plain data parallelism or ZeRO 0: every rank had all of them
        if saved.world == self.world:
            return asked and states.converted
        states.check(saved.world, self.world, ds)
        return True

    def _check_rows(self, saved: StepShape, folder: str | Path) -> None:
        if saved.rows == self.rows:
            return
        divided_otherwise = saved.world == self.world and saved.sequence_ranks != self.sequence_ranks
        raise SparseRingError(
            f"resume: {folder} was written with {saved.rows} rows a step ({saved.world} ranks, {saved.sequence_ranks} share "
            f"a sequence), here are {self.rows} ({self.world} ranks, {self.sequence_ranks} share one), so rows would be skipped "
            "or repeated: change accumulation steps or micro-batch so that a step takes as many"
            + f", or resume with degree = {saved.sequence_ranks} as saved"
            * divided_otherwise
        )


@dataclass(frozen=True)
class _States:
    """The optimizer states of the last checkpoint in a folder of DeepSpeed's. ``files``: of the ranks' partitions."""

    folder: Path
    files: tuple[Path, ...]

    @classmethod
    def of(cls, root: Path) -> _States | None:
        """None where DeepSpeed has saved nothing."""
        latest = root / "latest"
        if not latest.is_file():
            return None
        folder = root / latest.read_text(encoding="utf-8").strip()
        return cls(folder, tuple(folder.glob("*_optim_states.pt")))

    @property
    def converted(self) -> bool:
        """Whether they were converted, to the end, since they were written: DeepSpeed's tool writes that file last."""
        goal, latest = universal_folder(self.folder), self.folder.parent / "latest_universal"
        if not goal.is_dir() or not latest.is_file() or latest.read_text(encoding="utf-8").strip() != goal.name:
            return False
        written = max((file.stat().st_mtime_ns for file in self.files), default=0)
        return latest.stat().st_mtime_ns >= written

    def check(self, saved_world: int, world: int, ds: Mapping[str, Any]) -> None:
        """Refuse states that another number of ranks cannot read, or not yet.

        Raises:
            SparseRingError: states on disks, files that are left from another run, or none that are converted.
        """
        what = f"resume: {self.folder} was written by {saved_world} ranks, here are {world}"
        if ((ds.get("zero_optimization") or {}).get("offload_optimizer") or {}).get("device") == "nvme":
            raise SparseRingError(
                f'{what}, and DeepSpeed converts no optimizer states that are on disks (offload_optimizer, "device": "nvme"): '
                f"start {saved_world} ranks, or begin a new run from the saved weights"
            )
        if len(self.files) != saved_world:
            raise SparseRingError(
                f"{what}, and it holds optimizer states of {len(self.files)}, which DeepSpeed would convert together: copy them "
                f"all, or, if another run has left some, move away *_optim_states.pt of rank {saved_world} and above, and "
                "convert it again"
            )
        if not self.converted:
            folder, goal = shlex.quote(str(self.folder)), shlex.quote(str(universal_folder(self.folder)))
            raise SparseRingError(
                f"{what}, and DeepSpeed's optimizer states belong to a number of ranks: convert them, once, by\n"
                "    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state "
                f"--input_folder {folder} --output_folder {goal}\n"
                f"and start again as now; or start {saved_world} ranks"
            )


def universal_folder(folder: Path) -> Path:
    """Where the converted form of a checkpoint belongs."""
    return folder.with_name(f"{folder.name}_universal")


def set_universal(ds: MutableMapping[str, Any], universal: bool) -> None:
    """Have an engine of that configuration read the converted form of checkpoints, or not; whatever its file says.

    A key that is left in the file would have DeepSpeed go back to the converted checkpoint with each further resume.

    Args:
        ds: DeepSpeed's configuration, before the engine is made.
    """
    if universal or (ds.get("checkpoint") or {}).get("load_universal"):
        ds["checkpoint"] = {**(ds.get("checkpoint") or {}), "load_universal": universal}


def read_universal(engine: Any, universal: bool) -> None:
    """As `set_universal`, of an engine that is made already."""
    engine._config.load_universal_checkpoint = universal


def after_load(engine: Any, root: str | Path) -> None:
    """What is left to do when an engine has loaded a converted checkpoint; nothing if it has loaded another.

    Checkpoints that are loaded later, as of the best model, need not be converted.

    Args:
        root: the folder that was given to ``engine.load_checkpoint``.
    """
    if not engine.load_universal_checkpoint():
        return
    read_universal(engine, False)
    if engine.zero_optimization_stage() == 3:
        _mend_stage3(engine.optimizer.optimizer, Path(root))


def _mend_stage3(optimizer: torch.optim.Optimizer, root: Path) -> None:
    """Put right what DeepSpeed 0.19.8 loads wrongly under ZeRO-3.

    It gives every group of parameters the first one's settings, so that weight decay reaches norms and biases; and all groups
    share one tensor that counts steps, which each of them then advances, so that Adam's averages are corrected too little.
    """
    name = (root / "latest_universal").read_text(encoding="utf-8").strip()
    file = root / name / "zero" / "optimizer_state.pt"
    saved = torch.load(file, map_location="cpu", weights_only=False, mmap=True)["optimizer_state_dict"]["param_groups"]
    for group, of_group in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in of_group.items() if key != "params"})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
