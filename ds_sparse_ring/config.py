"""The section ``"sparse_ring"`` of a DeepSpeed configuration, read strictly.

The section is read in the same way for ``deepspeed.initialize`` and for the Transformers Trainer. Unknown keys, values
of a wrong type and combinations that cannot work are errors that name the way out: a value means what the user set, or
nothing starts. The configuration is immutable and holds nothing that depends on the run; what depends on the number of
ranks or on the model is checked by `SparseRingConfig.check_degree` and `SparseRingConfig.check_heads`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from ds_sparse_ring.config_base import BLOCK_TOKENS, Strict, check_multiple
from ds_sparse_ring.config_errors import describe_validation_error, refuse_auto, refuse_strays, section_of
from ds_sparse_ring.config_reads import check_reads
from ds_sparse_ring.config_schedule import check_schedule
from ds_sparse_ring.config_selectors import (
    BigBirdSelector,
    CompleteSelector,
    EveryQuerySelector,
    FixedSelector,
    FullSelector,
    LongformerSelector,
    MobaSelector,
    NormSelector,
    PricedSelector,
    PriceSelector,
    RandomDiagonalsSelector,
    Selector,
    TopPSelector,
    WindowSelector,
    XAttentionSelector,
)
from ds_sparse_ring.ds_json import load_ds_json
from ds_sparse_ring.errors import SparseRingError

__all__ = [
    "BLOCK_TOKENS",
    "BigBirdSelector",
    "CompleteSelector",
    "EveryQuerySelector",
    "FixedSelector",
    "FullSelector",
    "LongformerSelector",
    "MapsConfig",
    "MobaSelector",
    "NormSelector",
    "OffloadConfig",
    "PriceSelector",
    "PricedSelector",
    "RandomDiagonalsSelector",
    "ScheduleConfig",
    "Selector",
    "SparseRingConfig",
    "TopPSelector",
    "WindowSelector",
    "XAttentionSelector",
]


def _asks_every_query(data: Mapping[str, Any]) -> bool:
    """Of fields that are valid so far: every query chooses for a few of a KV head; else a probe for many queries of a head."""
    return isinstance(data.get("selector"), EveryQuerySelector)


class OffloadConfig(Strict):
    """Memory that a rank may use for what checkpointed layers keep, most of it outside the device; 1 GiB is 2**30 bytes."""

    host_gib: float = Field(gt=0)
    """Pinned host memory, for each rank; GiB, above 0."""

    device_gib: float = Field(default=0.0, ge=0)
    """Device memory for what the last layers keep, which is then never copied; GiB, what `plan` leaves free; 0 is none."""

    disk_path: str | None = None
    """Folder on a local NVMe disk for what exceeds the host memory; needs libaio. Null is no disk."""

    disk_gib: float | None = Field(default=None, gt=0)
    """Room on the disk, for each rank; GiB, above 0."""

    staging_gib: float = Field(default=2.0, gt=0)
    """Pinned memory beside host_gib through which tensors go to the disk and back; GiB, twice the largest of them."""

    kv_page_tokens: int | None = Field(default=None, ge=BLOCK_TOKENS)
    """Keys and values wait outside the device, and so many tokens of a shard are there at once; a multiple of 64; null is all."""

    @model_validator(mode="after")
    def _disk_is_whole(self) -> OffloadConfig:
        if self.disk_path is not None and self.disk_gib is None:
            raise ValueError(f'disk_path = "{self.disk_path}" needs disk_gib: how much each rank may take there')
        if self.disk_path is None and self.disk_gib is not None:
            raise ValueError(f"disk_gib = {self.disk_gib:g} needs disk_path: a folder on a local NVMe disk")
        return self

    @model_validator(mode="after")
    def _whole_blocks(self) -> OffloadConfig:
        check_multiple("kv_page_tokens", self.kv_page_tokens)
        return self


class ScheduleConfig(Strict):
    """How sparse attention is in the course of training. Steps are optimizer steps."""

    curriculum_steps: int = Field(default=0, ge=0)
    """Steps after the dense warm-up in which the budget moves from its start to what is configured; 0 is none."""

    start_selector: Selector | None = None
    """Selector at the start of the curriculum, of the configured kind: numbers that differ move step by step."""

    start_density: float | None = Field(default=None, gt=0, le=1)
    """Density at the start of the curriculum, where target_density is held; above 0, at most 1."""

    target_density: float | None = Field(default=None, gt=0, le=1)
    """Density to hold by moving the price: mean over patterns and layers that choose; null leaves the price alone."""

    min_layer_density: float | None = Field(default=None, gt=0, le=1)
    """Density below which no layer shall stay: such a layer gets a lower price of its own; null is none."""

    gain: float = Field(default=0.25, gt=0, le=1)
    """Share of a density's relative error by which prices change per step; lower is slower and calmer."""

    refresh_steps: int = Field(default=1, ge=1)
    """Every so many steps layers choose, and keep that until the next time; 1 is in every step."""

    reuse: Literal["diagonals", "index"] = "diagonals"
    """What is kept between: the diagonals (columns belong to a text), or the whole index, columns at their places."""

    explore_diagonals: int = Field(default=0, ge=0)
    """Random block diagonals beside the chosen ones, per pattern head and segment, others in each step; 0 is none."""

    explore_steps: int = Field(default=1, ge=1)
    """Every so many steps they are read; 1 is in every step."""


class MapsConfig(Strict):
    """Small pictures of attention that a run leaves in its output folder, for ``ds-sparse-ring inspect``."""

    every: int = Field(default=10, ge=1)
    """Logged steps from one recording to the next; the first logged step has one."""

    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Their layers, counted from 0; null is the first one, the one in the middle and the last one."""

    heads: list[Annotated[int, Field(ge=0)]] | None = None
    """Their query heads, counted from 0 among those of rank 0; null is the first one and the one in the middle."""


class SparseRingConfig(Strict):
    """What a user may set, with units and defaults; see the docstring below each field.

    Raises:
        SparseRingError: for any value that is refused, naming the key, the value and what is allowed.
    """

    SECTION: ClassVar[str] = "sparse_ring"

    degree: int | None = Field(default=None, ge=1)
    """Ranks that share one sequence; null is all ranks. Must divide the number of ranks."""

    ulysses_degree: int = Field(default=1, ge=1)
    """Neighbouring ranks that exchange heads for tokens (Ulysses); the ring runs over degree / ulysses_degree."""

    inner_degree: int | None = Field(default=None, ge=1)
    """Ranks of an inner ring, usually those of a node: a hierarchical ring; null is one flat ring. Must divide the degree."""

    inner: Literal["ring", "gather"] = "ring"
    """How an inner ring's ranks get each other's keys and values: one by one around it, or all at once ("gather")."""

    layout: Literal["striped", "contiguous", "zigzag"] = "striped"
    """Which rank holds which blocks of 64 tokens: every degree-th block, one run of them, or two mirrored runs."""

    backend: Literal["auto", "cuda", "triton", "cpu", "torch"] = "auto"
    """Kernels to use. Left out, the fastest that fits the device: "cuda" in C++ for Hopper GPUs, "triton" for all GPUs, "cpu" in
    C++; "torch" is the reference."""

    spare_multiprocessors: int = Field(default=0, ge=0)
    """Multiprocessors that the "cuda" attention kernels leave to transfers: a launch holds all others until it ends. The scores
    of "every_query" take all: they come before a layer's transfers."""

    selector: Selector = Field(default_factory=EveryQuerySelector)
    """How the active columns and diagonals are chosen; one of the kinds of `Selector`."""

    segment_tokens: int | None = Field(default_factory=lambda data: 512 if _asks_every_query(data) else 16384, ge=BLOCK_TOKENS)
    """Query tokens that share one choice; a multiple of 64; left out: 512 with "every_query", else 16384; null is one
    segment per document (as in MTraining), which "every_query" refuses."""

    probe: Literal["own", "previous"] = "own"
    """Whose last queries choose for a segment: its own, or those of the segment before (strictly causal)."""

    probe_tokens: int = Field(default=64, ge=1, le=BLOCK_TOKENS)
    """Last queries of a segment that are probed; tokens, 1 to 64."""

    local_blocks: int = Field(default=2, ge=1)
    """Block diagonals 0 .. local_blocks - 1 are always active; blocks of 64 tokens, at least 1."""

    sink_tokens: int = Field(default=4, ge=0)
    """First tokens of each document that are always active; tokens."""

    heads_per_pattern: int | None = Field(default_factory=lambda data: None if _asks_every_query(data) else 1, ge=1)
    """Query heads that share one choice; must divide the number of query heads per KV head; null is all of a KV head. Left out:
    all with "every_query", else 1."""

    dense_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start of training that use the full index."""

    dense_layers: Annotated[tuple[int | str, ...], Field(strict=False)] = ()
    """Layers that always use the full index: numbers (-1: the last), ranges ("0-3", "28-"), names of modules ("*.layers.7")."""

    schedule: ScheduleConfig | None = None
    """How sparse attention is in the course of training; null: the same in all steps after the dense warm-up."""

    eval_full_index: bool = False
    """Evaluate with the full index instead of the selected one."""

    checkpoint: Literal["output", "index"] = "output"
    """What gradient checkpointing keeps per layer: index and attention output (attended once), or the index."""

    layer_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a shard that pass through a decoder layer's norms, projections and MLP at once; null is all of them."""

    layer_inputs_every: int = Field(default=1, ge=1)
    """With layer_chunk_tokens, of so many decoder layers in a row only the first keeps its input; the backward pass makes the
    others' again by another forward pass of the layers between. 1: each keeps its own."""

    offload: OffloadConfig | None = None
    """Host memory and disk for what does not fit on the device, per rank; null is none."""

    true_recall_rows: int = Field(default=0, ge=0)
    """Query rows per layer whose recall is measured against dense attention whenever metrics are logged; 0 is off."""

    maps: MapsConfig | None = None
    """Attention of a few heads, recorded in logged steps for ``ds-sparse-ring inspect``; null is none."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a rank waits for others in attention before it ends with an error that names hop and peer."""

    log_steps: int = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics in train/pretrain.py; under Trainer its logging_steps rules. In logged steps
    recall is measured, too (``report_s`` of the line)."""

    def __init__(self, /, **values: Any) -> None:
        # Users see one kind of error, whether the values come from a file or from Python.
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SparseRingError(describe_validation_error(error, type(self), self.SECTION)) from None

    @model_validator(mode="after")
    def _check_together(self) -> SparseRingConfig:
        check_multiple("segment_tokens", self.segment_tokens)
        if self.inner == "gather" and self.inner_degree is None:
            raise ValueError(
                'inner = "gather" needs inner_degree, the ranks whose keys and values are held at once: '
                'set it (the degree itself gathers the whole sequence) or inner = "ring"'
            )
        if self.layer_inputs_every > 1 and self.layer_chunk_tokens is None:
            raise ValueError(
                f"layer_inputs_every = {self.layer_inputs_every} needs layer_chunk_tokens, by which layers are their own "
                "checkpoints: set it (e.g. 16384), or leave layer_inputs_every out"
            )
        check_reads(self, self.selector)
        if self.probe == "previous" and self.segment_tokens is None:
            raise ValueError(
                'probe = "previous" needs a segment before, but segment_tokens = null makes one segment per document: '
                'set segment_tokens (e.g. 16384) or probe = "own"'
            )
        if self.schedule is not None:
            check_schedule(self.schedule, self.selector)
        return self

    @property
    def page_tokens(self) -> int | None:
        """Tokens of a page of keys and values that wait outside the device; None: they stay on it."""
        return None if self.offload is None else self.offload.kv_page_tokens

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any]) -> SparseRingConfig:
        """Read the section of a DeepSpeed configuration.

        Args:
            source: path of a JSON file, or the configuration as a mapping (also ``engine.config`` and
                ``args.hf_deepspeed_config.config``).

        Raises:
            SparseRingError: if the file cannot be read, the section is missing or anything in it is refused, or if the
                configuration holds a section that cannot work beside ours.
        """
        if not isinstance(source, Mapping | str | Path):
            raise SparseRingError(
                f"the DeepSpeed configuration is {type(source).__name__}: give the path of its JSON file, or a mapping "
                f'with a section "{cls.SECTION}"'
            )
        config = source if isinstance(source, Mapping) else load_ds_json(source)
        where = "the DeepSpeed configuration" if isinstance(source, Mapping) else str(source)
        section = section_of(config, cls.SECTION, where)
        refuse_strays(config, cls.model_fields, cls.SECTION, where)
        refuse_auto(section, cls.SECTION)
        return cls(**section)

    def check_degree(self, world_size: int) -> int:
        """Ranks that share one sequence when the run has ``world_size`` ranks.

        Raises:
            SparseRingError: if the degree does not divide the number of ranks, or the inner degree not the degree.
        """
        size = self._sequence_size(world_size)
        if size % self.ulysses_degree:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            raise SparseRingError(
                f"{self.SECTION}.ulysses_degree = {self.ulysses_degree} does not divide the {size} ranks that share a sequence: "
                f"use {_one_of(divisors)}"
            )
        ring = size // self.ulysses_degree
        if self.inner_degree is not None and ring % self.inner_degree:
            divisors = [n for n in range(1, ring + 1) if ring % n == 0]
            raise SparseRingError(
                f"{self.SECTION}.inner_degree = {self.inner_degree} does not divide the {ring} ranks of a ring: "
                f"use {_one_of(divisors)}, or null for one flat ring"
            )
        return size

    def _sequence_size(self, world_size: int) -> int:
        if self.degree is None:
            return world_size
        if world_size % self.degree:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise SparseRingError(
                f"{self.SECTION}.degree = {self.degree} does not divide the {world_size} ranks of this run: "
                f"use {_one_of(divisors)}, or null for all ranks"
            )
        return self.degree

    def check_heads(self, num_q_heads: int, num_kv_heads: int) -> None:
        """Check ``heads_per_pattern`` against a model.

        A pattern may not cross KV heads: its columns are gathered once, from one KV head.

        Raises:
            SparseRingError: if the model's query heads do not divide by its KV heads, or a pattern crosses KV heads.
        """
        if num_kv_heads < 1 or num_q_heads % num_kv_heads:
            raise SparseRingError(
                f"the model has {num_q_heads} query heads for {num_kv_heads} KV heads; "
                "grouped-query attention needs a whole number of query heads per KV head"
            )
        group = num_q_heads // num_kv_heads
        if num_q_heads % self.ulysses_degree or (num_kv_heads % self.ulysses_degree and self.ulysses_degree % num_kv_heads):
            usable = [
                n for n in range(1, num_q_heads + 1) if num_q_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
            ]
            raise SparseRingError(
                f"{self.SECTION}.ulysses_degree = {self.ulysses_degree} does not share out {num_q_heads} query and "
                f"{num_kv_heads} KV heads: use {_one_of(usable)}"
            )
        if self.ulysses_degree > num_kv_heads:
            group = num_q_heads // self.ulysses_degree  # each rank has a part of a group
        if self.heads_per_pattern is not None and group % self.heads_per_pattern:
            divisors = [n for n in range(1, group + 1) if group % n == 0]
            raise SparseRingError(
                f"{self.SECTION}.heads_per_pattern = {self.heads_per_pattern} does not divide the {group} query heads "
                f"that share a KV head in this model ({num_q_heads} query, {num_kv_heads} KV): "
                f"use {_one_of(divisors)}"
            )


def _one_of(numbers: list[int]) -> str:
    *first, last = [str(n) for n in numbers]
    return f"{', '.join(first)} or {last}" if first else last
