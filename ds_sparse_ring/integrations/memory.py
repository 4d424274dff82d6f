"""What a model's layers keep for the backward pass, and whether a run fits its devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import ValidationError
from torch import nn

from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.integrations.chunked_layers import is_chunked
from ds_sparse_ring.job import Job, ModelShape, Schedule, states_of
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.ladder import KeptBytes
from ds_sparse_ring.memory import refuse_misfit
from ds_sparse_ring.pinned import memory_limit
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.units import GIB


def kept_by_layers(decoder: nn.Module, ring: SparseRing) -> KeptBytes | None:
    """Bytes that each layer of a decoder stack keeps of a token; None in evaluation and for layers that are not checkpointed."""
    if not (decoder.training and torch.is_grad_enabled() and is_checkpointed(decoder)):
        return None
    config: Any = decoder.config
    weights = next(decoder.parameters())
    device = weights.device.type
    worked_in = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weights.dtype
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = max(config.num_key_value_heads, ring.axes.ulysses_size)
    return KeptBytes.of_token(
        config.num_hidden_layers, config.hidden_size, heads, kv_heads, head_size,
        paged=ring.config.page_tokens is not None, inputs_every=ring.config.layer_inputs_every,
        input_bytes=weights.dtype.itemsize, output_bytes=worked_in.itemsize, sum_bytes=accumulator_dtype(worked_in).itemsize,
    )  # fmt: skip


def is_checkpointed(model: nn.Module) -> bool:
    """Whether layers keep their inputs alone."""
    return any(getattr(module, "gradient_checkpointing", False) or is_chunked(module) for module in model.modules())


def device_bytes() -> int | None:
    """Memory of this rank's GPU; None on a CPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if torch.cuda.is_available() else None


def memory_peaks(ring: SparseRing) -> dict[str, float]:
    """The most that one rank has held so far, GiB. Collective over all ranks.

    Returns:
        ``peak_memory_gib`` on the device (none on a CPU); with an ``"offload"`` section ``peak_host_gib`` of the store's slab,
        staging of the disk included, and ``peak_disk_gib`` of its file.
    """
    cuda, store = torch.cuda.is_available(), None if ring.spill is None else ring.spill.store
    peaks = {"peak_memory_gib": float(torch.cuda.max_memory_allocated())} if cuda else {}
    if ring.spill is not None:  # on every rank or on none
        held = {} if store is None else store.numbers().bytes_peak
        peaks |= {f"peak_{tier}_gib": float(held.get(tier, 0)) for tier in ("host", "disk")}
    of_ranks = ring.axes.world_rows(list(peaks.values())) if peaks else []
    return {name: max(values) / GIB for name, values in zip(peaks, zip(*of_ranks, strict=True), strict=True)}


def check_memory(
    model: Any, optimizer: Any, ring: SparseRing, ds: Mapping[str, Any], sequence: Sequence, loss_tile: int = 1
) -> None:
    """Refuse a first batch that cannot be trained on, before anything is computed; rank 0 says so if a model's sizes are unknown.

    Collective over all ranks: what one of them is refused ends all. The store of an ``"offload"`` section is opened, too: its
    memory, its file on the disk, and DeepSpeed's op for that.

    What is not known beforehand counts as nothing: columns of the index, logits without ``loss_tile``, layers that are not
    checkpointed, more than two bytes an activation. So what is refused does not fit; what is not may still be too much.

    Args:
        model: of Transformers, without wrappers. optimizer: the one that DeepSpeed or Trainer made, or None.
        ds: DeepSpeed's configuration, {} without it. loss_tile: tokens whose logits exist at once.

    Raises:
        SparseRingError: naming bytes and ways out.
    """
    try:
        shape = ModelShape(**model.config.to_dict())
    except ValidationError as error:
        lacking = ", ".join(sorted(str(one["loc"][0]) for one in error.errors()))
        if ring.axes.rank == 0:
            print(f"memory is not checked before the first step: {type(model.config).__name__} says nothing about {lacking}")
        return
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    trained = sum(n for n, wanted in sizes if wanted) / max(1, sum(n for n, _ in sizes))
    kinds = {type(one).__name__.lower() for one in (optimizer, getattr(optimizer, "optimizer", None))}
    adam = any("adam" in kind for kind in kinds)
    config = ring.config
    if not is_checkpointed(model):  # layers keep more than is counted, and on the device
        config = config.model_copy(update={"offload": None})
    job = Job(
        shape,
        load_hardware("h200"),  # no rate is asked for
        config,
        sequence.tokens,
        ring.axes.world_size,
        density=0.0,
        columns=0.0,
        loss_tile=loss_tile,
        trained_share=trained,
        optimizer_bytes=12 if adam else 4,
        **states_of(ds),
    )
    schedule, limit = Schedule(config.ulysses_degree, config.inner_degree, config.inner), memory_limit()
    problem = None
    try:
        refuse_misfit(job, schedule, device_bytes(), None if limit is None else limit / ring.ranks_on_host)
        if ring.spill is not None and config.offload is not None:
            ring.spill.open(torch.device(get_accelerator().current_device_name()))
    except SparseRingError as error:
        problem = error
    _end_together(problem, ring)


def _end_together(problem: SparseRingError | None, ring: SparseRing) -> None:
    refused = [rank for rank, (flag,) in enumerate(ring.axes.world_rows([float(problem is not None)])) if flag]
    if problem is not None:
        raise problem
    if refused:
        raise SparseRingError(f"training does not begin: ranks {', '.join(map(str, refused))} say why")
