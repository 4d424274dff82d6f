"""Floating-point operations of a training step, for model FLOPs utilisation (MFU).

Counted as is usual: 2 per multiply-add, the backward pass twice the forward pass, nothing for what checkpointing computes
again. Attention counts (query, key) pairs: 12 D a pair and query head for both passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 peak of a device (SXM) by a word of its name, as its maker states it; FLOP/s."""


def matrix_parameters(model: nn.Module) -> int:
    """Parameters that take part in matrix products: all but embeddings that are looked up and vectors; a tied head counts."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    counted = {id(p): _size(p) for m in model.modules() if isinstance(m, nn.Linear) for p in [m.weight]}
    if head is not None:
        counted[id(head.weight)] = _size(head.weight)
    return sum(counted.values())


def _size(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 leaves an empty tensor behind


def step_flops(config: Any, parameters: int, tokens: int, pairs: float) -> float:
    """Of one step.

    Args:
        config: the model's. parameters: of its matrix products. tokens: of the step, over all ranks.
        pairs: (query, key) pairs of a head, summed over sequences: all causal ones for "dense-equivalent", active ones for
            "executed".
    """
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12.0 * head_size * config.num_attention_heads * config.num_hidden_layers * pairs
    return 6.0 * parameters * tokens + attention


def utilisation(
    config: Any, parameters: int, tokens: int, causal_pairs: float, density: float, device_seconds: float
) -> dict[str, float]:
    """Model FLOPs utilisation: ``mfu_executed`` counts active pairs, ``mfu_dense_equivalent`` all causal ones.

    Args:
        causal_pairs: as ``pairs`` of `step_flops`, inside documents; density: active share of them.
        device_seconds: wall seconds times devices.

    Returns:
        Shares of the device's peak; nothing where that is not known.
    """
    peak = peak_flops()
    if peak is None:
        return {}
    pairs = {"mfu_executed": density * causal_pairs, "mfu_dense_equivalent": causal_pairs}
    return {name: step_flops(config, parameters, tokens, count) / (device_seconds * peak) for name, count in pairs.items()}


def peak_flops() -> float | None:
    """Of this device; None if it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name.replace("-", " ").split()), None)
