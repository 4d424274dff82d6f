"""Options that benchmarks share."""

from __future__ import annotations

import torch

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.plan_report import parse_tokens


def chosen_device(benchmark: str, device: str) -> torch.device:
    """Where a benchmark runs: on the GPU, unless it is told otherwise.

    Args:
        benchmark: name of the command. device: ``cuda``, ``cuda:1``, ``cpu``; empty if none was given.

    Raises:
        SparseRingError: there is no GPU and the CPU was not asked for, on which the defaults are slow; another device.
    """
    kind = device.partition(":")[0] or "cuda"
    if kind not in ("cuda", "cpu"):
        raise SparseRingError(f"bench {benchmark}: --device {device}: give cuda or cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SparseRingError(
            f"bench {benchmark}: there is no GPU here: measure the CPU kernels by ds-sparse-ring bench cpu, or give --device cpu "
            "and a small case, it is slow"
        )
    return torch.device(device or "cuda")


def tokens_or_none(text: str) -> int:
    """As :func:`parse_tokens`, and 0, which stands for whole sequences or for none."""
    return 0 if text.strip() == "0" else parse_tokens(text)
