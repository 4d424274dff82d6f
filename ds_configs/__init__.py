"""DeepSpeed configurations to start from: ZeRO 1, 2 and 3, and 3 with optimizer and parameters in host memory.

Each file serves the Trainer (``TrainingArguments(deepspeed=...)``), which fills every ``"auto"`` from its arguments,
and a plain ``deepspeed.initialize``, for which `ds_sparse_ring.ds_json.resolve_auto` fills the same keys.

The optimizer of the first three is torch's own AdamW (``"torch_adam"``), because DeepSpeed's fused one has to be
compiled first. With offload DeepSpeed's CPU Adam is used, which is compiled when it is first needed (about a minute).
"""

from __future__ import annotations

from pathlib import Path

from ds_sparse_ring.errors import SparseRingError

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The configurations that come with the package, e.g. "zero3"."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def path(name: str) -> Path:
    """The file of a configuration that comes with the package.

    Raises:
        SparseRingError: if there is none of this name; the message lists them.
    """
    if name not in names():
        raise SparseRingError(f'there is no configuration "{name}": use one of {", ".join(names())}, or the path of a file')
    return _FOLDER / f"{name}.json"
