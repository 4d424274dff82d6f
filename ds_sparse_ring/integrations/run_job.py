"""What a training loop writes into the first line of its log."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_sparse_ring.job import ModelShape
from ds_sparse_ring.run_log import RunJob
from ds_sparse_ring.runtime import SparseRing


def run_job(
    model: nn.Module,
    ring: SparseRing,
    device: torch.device,
    *,
    sequence_tokens: int,
    micro_batch: int,
    accumulation: int,
    zero_stage: int,
    loss_tile_tokens: int = 0,
    liger: bool = False,
) -> RunJob:
    """See `RunJob`.

    Args:
        model: of Transformers, with its ``config``. sequence_tokens: of a row. micro_batch: rows that a ring works on at once.
            accumulation: micro-batches of a step. loss_tile_tokens: tokens whose logits exist at once, 0 for all.

    Raises:
        SparseRingError: the model's configuration lacks what the planner asks for.
    """
    config: Any = model.config
    return RunJob(
        model=ModelShape.of(config.to_dict(), type(config).__name__),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        world=ring.axes.world_size,
        sequence_tokens=sequence_tokens,
        micro_batch=micro_batch,
        accumulation=accumulation,
        zero_stage=zero_stage,
        loss_tile_tokens=loss_tile_tokens,
        liger=liger,
        sparse_ring=ring.config.model_dump(),
    )
