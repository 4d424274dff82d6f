"""DeepSpeed JSON files: read strictly, and filled without Transformers.

One file serves the Trainer, which replaces every ``"auto"`` from its own arguments, and a plain
``deepspeed.initialize``, which cannot read ``"auto"``: `resolve_auto` fills the same keys from given values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_sparse_ring.errors import SparseRingError


def load_ds_json(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration as strict JSON.

    Transformers reads strict JSON while DeepSpeed takes comments; a file that only one of them accepts is refused here.

    Raises:
        SparseRingError: if the file is missing, is not strict JSON, repeats a key or does not hold an object.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SparseRingError(
            f"cannot read the DeepSpeed configuration {path}: {error.strerror}: give the path of a JSON file, such as "
            "ds_configs/zero3.json"
        ) from None
    except UnicodeDecodeError as error:
        raise SparseRingError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): save it as such") from None
    try:
        config = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise SparseRingError(
            f"{path} is not strict JSON, which Transformers needs (no comments, no trailing commas): "
            f"line {error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except ValueError as error:
        raise SparseRingError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise SparseRingError(
            f"{path} holds {type(config).__name__}, not an object with DeepSpeed's settings: write them between braces"
        )
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f'the key "{key}" stands twice in one object; only the last would count: remove one')
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number: write one, or leave the key out")


def resolve_auto(
    config: Mapping[str, Any],
    *,
    micro_batch: int,
    world_size: int,
    accumulation: int = 1,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    clip: float | None = None,
    bf16: bool | None = None,
    hidden_size: int | None = None,
) -> dict[str, Any]:
    """A copy of ``config`` in which every ``"auto"`` is filled, for a plain ``deepspeed.initialize``.

    A key that already holds a value keeps it; like the Trainer, this refuses a caller who says something else.

    Args:
        micro_batch: batches of the loader per rank and micro-step, as DeepSpeed counts them.
        world_size: all ranks; the ranks of one ring too count as data parallel for DeepSpeed.
        accumulation: micro-steps per optimizer step.
        lr, betas, eps, weight_decay: AdamW, as in ``torch.optim.AdamW``.
        clip: bound of the gradient norm; 0 is none.
        bf16: train in bfloat16 with fp32 master weights.
        hidden_size: of the model; sizes the buckets of ZeRO as Transformers does, in elements.

    Raises:
        SparseRingError: naming the keys that stay ``"auto"`` because no value was given for them, or those where file
            and caller disagree.
    """
    resolved: dict[str, Any] = copy.deepcopy(dict(config))
    must_match = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch * accumulation * world_size,
        "gradient_clipping": clip,
        "bf16.enabled": bf16,
        "optimizer.params.lr": lr,
        "optimizer.params.betas": None if betas is None else list(betas),
        "optimizer.params.eps": eps,
        "optimizer.params.weight_decay": weight_decay,
    }
    mismatches = []
    for path, value in must_match.items():
        found = _fill(resolved, path, value)
        if value is not None and found is not None and found != value:
            mismatches.append(f"{path} is {found} in the file and {value} in the arguments")
    if mismatches:
        raise SparseRingError("; ".join(mismatches) + ': make them agree, or write "auto" in the file')
    if hidden_size is not None:
        _fill(resolved, "zero_optimization.reduce_bucket_size", hidden_size**2)
        _fill(resolved, "zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden_size**2))
        _fill(resolved, "zero_optimization.stage3_param_persistence_threshold", 10 * hidden_size)
    left = _auto_paths(resolved, "")
    if left:
        raise SparseRingError(
            f'these keys are still "auto": {", ".join(left)}; only Trainer can fill them. Write values into the '
            "file, or give the training loop values for them"
        )
    return resolved


def _fill(config: dict[str, Any], path: str, value: Any) -> Any:
    """Put ``value`` where ``path`` holds "auto", and return what the path holds then; None if there is no such key."""
    *parents, key = path.split(".")
    node: Any = config
    for parent in parents:
        node = node.get(parent)
        if not isinstance(node, dict):
            return None
    if node.get(key) == "auto" and value is not None:
        node[key] = value
    return node.get(key)


def _auto_paths(node: Any, path: str) -> list[str]:
    if node == "auto":
        return [path]
    if isinstance(node, Mapping):
        return [found for key, value in node.items() for found in _auto_paths(value, f"{path}.{key}" if path else str(key))]
    if isinstance(node, list):
        return [found for i, value in enumerate(node) for found in _auto_paths(value, f"{path}[{i}]")]
    return []
