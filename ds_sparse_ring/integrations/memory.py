"""What a model's layers keep for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.ladder import KeptBytes


def kept_by_layers(decoder: nn.Module) -> KeptBytes | None:
    """Bytes that each layer of a decoder stack keeps of a token; None in evaluation, which keeps nothing."""
    if not (decoder.training and torch.is_grad_enabled()):
        return None
    config: Any = decoder.config
    weights = next(decoder.parameters())
    device = weights.device.type
    worked_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights.dtype
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    output = heads * head_size * worked_in.itemsize, heads * accumulator_dtype(worked_in).itemsize
    return KeptBytes(config.num_hidden_layers, config.hidden_size * weights.dtype.itemsize, output)
