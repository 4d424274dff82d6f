"""The ring that Trainer's arguments describe, and the arguments under which training would not equal that of one process."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.runtime import SparseRing


def make_ring(args: TrainingArguments) -> SparseRing:
    """The ring of the section ``"sparse_ring"`` of ``args.deepspeed``.

    Raises:
        SparseRingError: there is no such file or section.
    """
    if getattr(args, "hf_deepspeed_config", None) is None:
        raise SparseRingError(
            'no DeepSpeed configuration: pass TrainingArguments(deepspeed="file.json") whose file has a section '
            '"sparse_ring", or ring=SparseRing(SparseRingConfig(...))'
        )
    _ = args.device  # sets up torch.distributed
    return SparseRing.from_deepspeed(args.hf_deepspeed_config.config)


def check_arguments(args: TrainingArguments, compute_loss_func: Any) -> None:
    """Raise a `SparseRingError` for what cannot be computed exactly on a ring."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if args.world_size != world or args.n_gpu > 1:
        raise SparseRingError(
            f"Trainer sees {args.world_size} process(es), torch.distributed {world}: start one process per device, and "
            "without a GPU set use_cpu=True (otherwise every rank would train on the same data)"
        )
    accelerator: Any = args.accelerator_config
    if getattr(args, "parallelism_config", None) is not None:
        raise SparseRingError('parallelism_config is set: leave it out, "sparse_ring": {"degree": N} makes the ring')
    refused = [
        (not args.average_tokens_across_devices, "average_tokens_across_devices=False", "the loss is a global mean"),
        (args.label_smoothing_factor, "label_smoothing_factor", "it would shift labels that are shifted already: leave it out"),
        (compute_loss_func, "compute_loss_func", "labels arrive shifted and as parts: override compute_loss instead"),
        (
            getattr(args, "neftune_noise_alpha", None),
            "neftune_noise_alpha",
            "its noise depends on the length of a part",
        ),
        (args.train_sampling_strategy == "batch_rebalance", "train_sampling_strategy", 'use "random" or "sequential"'),
        (accelerator.split_batches, "accelerator_config.split_batches", "batches belong to rings, not to ranks"),
        (accelerator.dispatch_batches, "accelerator_config.dispatch_batches", "each rank shards batches for itself"),
        (not accelerator.even_batches, "accelerator_config.even_batches=False", "rings would run out of data apart"),
        ("inputs" in args.include_for_metrics, 'include_for_metrics=["inputs"]', "a rank has only its part of them"),
    ]
    for found, name, reason in refused:
        if found:
            raise SparseRingError(f"TrainingArguments: {name} is not supported here: {reason}")
