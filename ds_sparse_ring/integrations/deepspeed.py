"""DeepSpeed with a sparse ring: what an engine must be like, the scale of the loss, and the set-up that a run prints.

DeepSpeed sees plain data parallelism over all ranks. Every ZeRO stage then averages gradients over the world, so a
rank's loss is ``world size * sum of its token losses / count of targets over all ranks and accumulation steps`` and
the average is the gradient of one process. With DeepSpeed's own sequence parallelism this would not hold: its stages
divide by different numbers.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from ds_sparse_ring.config_reads import unread
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.model_checks import check_offload
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.kernels import GPU_BACKENDS
from ds_sparse_ring.kernels.dense import DenseCase, find_dense
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.units import GIB


def join_ranks() -> None:
    """``deepspeed.init_distributed`` of a program that a launcher has started; nothing if the ranks have met already.

    Raises:
        SparseRingError: no launcher has, and there is no MPI, which DeepSpeed would ask then.
    """
    if not dist.is_initialized() and "RANK" not in os.environ and importlib.util.find_spec("mpi4py") is None:
        raise SparseRingError(
            f"no launcher has started this process: start it by deepspeed --num_gpus N {sys.argv[0]} ... (without a GPU "
            "DS_ACCELERATOR=cpu deepspeed --num_accelerators N), or by torch.distributed.run"
        )
    deepspeed.init_distributed()


def initialize(
    model: nn.Module, config: str | Path | Mapping[str, Any], *, ring: SparseRing | None = None, **kwargs: Any
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` for a model that attends on a ring, with the checks before and after it.

    Args:
        config: DeepSpeed's configuration, without ``"auto"`` (see `ds_sparse_ring.ds_json.resolve_auto`).
        ring: made from the section ``"sparse_ring"`` of ``config`` if left out.
        kwargs: passed on; ``model_parameters``, ``optimizer``, ``lr_scheduler`` and so on.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler.

    Raises:
        SparseRingError: a model or configuration that is refused.
    """
    if kwargs.get("mpu") is not None:
        raise SparseRingError(_NO_MPU)
    ring = SparseRing.from_deepspeed(config) if ring is None else ring
    attach(model, ring)
    ds = config if isinstance(config, Mapping) else load_ds_json(config)
    if ds.get("zero_optimization", {}).get("stage") == 3:
        warn_if_whole(model, ring)
    result = deepspeed.initialize(model=model, config=config, **kwargs)
    check_engine(result[0], ring)
    return result


_NO_MPU = (
    "an mpu (or sequence_parallel_size > 1) gives DeepSpeed a sequence axis of its own, and gradients would be scaled "
    "wrongly: "
    'leave mpu out and set "sparse_ring": {"degree": N}, the ranks of a ring count as data parallel'
)


def check_engine(engine: Any, ring: SparseRing) -> None:
    """Refuse an engine whose gradients would not be those of one process.

    Raises:
        SparseRingError: naming what was found and the way out.
    """
    if engine.mpu is not None or engine.sequence_parallel_size > 1:
        raise SparseRingError(_NO_MPU)
    if engine.dp_world_size != ring.axes.world_size:
        raise SparseRingError(
            f"DeepSpeed averages gradients over {engine.dp_world_size} ranks, the ring was made for "
            f"{ring.axes.world_size}: "
            "use no tensor or pipeline parallelism, and create the ring after deepspeed.init_distributed()"
        )
    if engine.zero_optimization_stage() == 3:
        whole = [name for name, parameter in engine.module.named_parameters() if not hasattr(parameter, "ds_id")]
        if whole:
            raise SparseRingError(
                f"ZeRO-3 does not partition {whole[0]} and {len(whole) - 1} more: they were added to the model after "
                "deepspeed.initialize; finish the model first"
            )


def warn_if_whole(model: nn.Module, ring: SparseRing) -> None:
    """Warn, on rank 0, of a model that each rank holds whole although ZeRO-3 is to divide it; before DeepSpeed gets it.

    DeepSpeed divides it then, but memory had to hold it once on every rank. Adapters around a divided model are fine.
    """
    divided = whole = nbytes = 0
    parameter: Any
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            divided += parameter.ds_numel
        else:
            whole += parameter.numel()
            nbytes += parameter.nbytes
    if ring.axes.rank == 0 and ring.axes.world_size > 1 and whole > divided:
        warnings.warn(
            f"the model was made before ZeRO-3 was in force: each rank holds all of it, {whole} parameters in {nbytes / GIB:.2g} "
            "GiB, until DeepSpeed divides it. Make it after deepspeed.init_distributed() and after "
            "TrainingArguments(deepspeed=...) or, in a loop of your own, while an HfDeepSpeedConfig(config) lives",
            stacklevel=3,
        )


def loss_scale(ring: SparseRing, targets: Tensor) -> Tensor:
    """Factor from the sum of a rank's token losses to the loss it calls backward on.

    Args:
        targets: valid targets of all ranks and accumulation steps (`SparseRing.count_targets`).

    Returns:
        float32 scalar; finite if there is no target at all. DeepSpeed must not divide by the accumulation steps again:
        ``engine.backward(loss, scale_wrt_gas=False)``.
    """
    return ring.axes.world_size / targets.clamp(min=1).to(torch.float32)


def full_state_dict(engine: Any) -> dict[str, Tensor]:
    """All parameters and persistent buffers on the host of rank 0; empty on other ranks. Collective over the world.

    ZeRO-3 gathers one parameter at a time, so that no device needs room for the whole model.
    """
    module: nn.Module = engine.module
    main = deepspeed.comm.get_rank() == 0
    state: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in seen:
            with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                seen[id(parameter)] = parameter.detach().cpu().clone() if main else parameter.new_empty(0)
        state[name] = seen[id(parameter)]
    for name, value in module.state_dict().items():
        if name not in state:
            state[name] = value.detach().cpu().clone()
    return state if main else {}


def save_pretrained(engine: Any, folder: str | Path, tokenizer: Any = None) -> None:
    """Save the model as Transformers does, from any ZeRO stage; plain ``from_pretrained`` loads it. Collective.

    Args:
        tokenizer: saved beside the model.
    """
    state = full_state_dict(engine)
    if deepspeed.comm.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    deepspeed.comm.barrier()


@dataclass(frozen=True)
class Setup:
    """What a run will do, for people to check before it costs anything."""

    ring: SparseRing
    zero_stage: int
    micro_batch: int
    accumulation: int
    dtype: str
    gradient_checkpointing: bool

    def __post_init__(self) -> None:
        """Refuse what would do nothing.

        Raises:
            SparseRingError: memory outside the device for what checkpointed layers keep, without checkpointing.
        """
        config = self.ring.config
        check_offload(config, checkpointed=self.gradient_checkpointing or config.layer_chunk_tokens is not None)

    def backend(self) -> str:
        """The kernels, and the library that does the full index."""
        name = self.ring.kernel.name
        if name not in GPU_BACKENDS or self.ring.axes.ring_size > 1 or not torch.cuda.is_available():
            return f"{name}, {self.dtype}"
        dense = find_dense(DenseCase(torch.device("cuda"), torch.bfloat16, head_size=128, heads=8, kv_heads=8))
        return f"{name}, {self.dtype}; full index in half precision: {dense.name if dense is not None else name}"

    def checkpointing(self) -> str:
        """What layers keep for the backward pass, and where."""
        config = self.ring.config
        if not self.gradient_checkpointing and config.layer_chunk_tokens is None:
            return "off"
        kept = "index and output kept" if config.checkpoint == "output" else "index kept, attention computed again"
        if config.offload is not None:
            disk = f", then {config.offload.disk_gib:g} GiB in {config.offload.disk_path}" if config.offload.disk_path else ""
            kept += f"; with layer inputs in host memory, up to {config.offload.host_gib:g} GiB a rank{disk}"
        if config.layer_chunk_tokens is None:
            return kept
        every = "" if config.layer_inputs_every == 1 else f", an input kept of {config.layer_inputs_every} in a row"
        return f"layers in chunks of {config.layer_chunk_tokens} tokens{every}; {kept}"

    def _pages(self) -> list[tuple[str, str]]:
        tokens = self.ring.config.page_tokens
        if tokens is None:
            return []
        return [("keys and values", f"in host memory until the backward pass, in pages of {tokens} tokens")]

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line."""
        config, axes = self.ring.config, self.ring.axes
        one = axes.sequence_size == 1
        ring_ranks = "a sequence per rank" if one else f"{axes.sequence_size} consecutive ranks share a sequence"
        if axes.inner_size is not None:
            ring_ranks += f", in inner rings of {axes.inner_size}"
        if axes.ulysses_size > 1:
            ring_ranks += f"; groups of {axes.ulysses_size} exchange heads for tokens"
        sequences = self.micro_batch * self.accumulation * axes.data_size
        segment = "one per document" if config.segment_tokens is None else f"{config.segment_tokens} tokens"
        full_index = f"full index for the first {config.dense_warmup_steps} steps" if config.dense_warmup_steps else ""
        dense_layers = f"in layers {', '.join(map(str, config.dense_layers))} always" if config.dense_layers else ""
        return [
            ("ranks", f"{axes.world_size} = data axis {axes.data_size} x sequence axis {axes.sequence_size}; {ring_ranks}"),
            ("layout", f"{config.layout}, blocks of 64 tokens"),
            ("selector", ", ".join(filter(None, (describe_selector(config.selector), full_index, dense_layers)))),
            *self._schedule_rows(),
            *self._probe_rows(segment),
            ("attention backend", self.backend()),
            ("ZeRO stage", str(self.zero_stage)),
            ("gradient checkpointing", self.checkpointing()),
            *self._pages(),
            (
                "sequences per step",
                f"{sequences} = micro batch {self.micro_batch} x accumulation {self.accumulation} x data axis "
                f"{axes.data_size} (a sequence is a row of the data loader)",
            ),
            (
                "DeepSpeed's train_batch_size",
                f"{self.micro_batch * self.accumulation * axes.world_size}"
                + ("" if one else f": it counts every rank, so each sequence {axes.sequence_size} times"),
            ),
        ]

    def _schedule_rows(self) -> list[tuple[str, str]]:
        """What changes in the course of training."""
        schedule = self.ring.config.schedule
        if schedule is None:
            return []
        start = None if schedule.start_selector is None else describe_selector(schedule.start_selector)
        if schedule.start_density is not None:
            start = f"density {schedule.start_density:g}"
        reused = "index" if schedule.reuse == "index" else "diagonals and first tokens"
        every = f"in every {schedule.explore_steps}. step" if schedule.explore_steps > 1 else "in every step"
        parts = [
            f"from {start} over {schedule.curriculum_steps} steps" if start else "",
            f"price moves to hold density {schedule.target_density:g}" if schedule.target_density is not None else "",
            f"no layer below density {schedule.min_layer_density:g}" if schedule.min_layer_density is not None else "",
            f"chosen every {schedule.refresh_steps} steps, {reused} reused between" if schedule.refresh_steps > 1 else "",
            f"{schedule.explore_diagonals} random diagonals {every}" if schedule.explore_diagonals else "",
        ]
        return [("schedule", "; ".join(filter(None, parts)) or "none")]

    def _probe_rows(self, segment: str) -> list[tuple[str, str]]:
        """How a selection by probes works, and what is active without one."""
        config = self.ring.config
        hidden = unread(config.selector)
        if "segment_tokens" in hidden:
            return []
        if "probe" in hidden:
            return [("segments", segment)]
        return [
            ("segments", f"{segment}, probed by {config.probe_tokens} queries ({config.probe} segment)"),
            ("always active", f"{config.local_blocks} block diagonals, {config.sink_tokens} first tokens of a document"),
        ]


def describe_selector(selector: Any) -> str:
    """A selector and its budgets in one line."""
    values = selector.model_dump()
    kind = values.pop("kind")
    return " ".join([kind, *(f"{key}={value}" for key, value in values.items() if value is not None)])


def print_setup(setup: Setup) -> None:
    """Print the set-up as a table on rank 0."""
    if setup.ring.axes.rank != 0:
        return
    table = Table(show_header=False, title="sparse ring", title_justify="left")
    for label, text in setup.rows():
        table.add_row(label, text)
    Console(width=None if Console().is_terminal else 120).print(table)
