"""Step time and memory of a training set-up before it is launched, for every schedule that the set-up allows.

Attention is simulated from the plans (`simulate`); everything else is FLOPs over a rate, and bytes. What ZeRO sends is left
out: it overlaps with long sequences. Times in ms, sizes in bytes, of one rank.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from ds_sparse_ring.config import FullSelector, SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.hardware import Hardware
from ds_sparse_ring.layout import BLOCK, Layout
from ds_sparse_ring.plan import InnerKind
from ds_sparse_ring.plan_check import PlanReport, check_plans
from ds_sparse_ring.simulate import Links, PassTime, Work, simulate_pass

_BF16, _FP32, _INT64 = 2, 4, 8
_IN_FLIGHT_LAYERS = 4  # whose kept tensors are on the device for copies: two on the way out, two on the way back
_OPTIMIZER_BYTES = 12  # fp32 weights and two moments of Adam


class ModelShape(BaseModel):
    """The sizes of a decoder, by the names of Transformers' configurations."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    head_dim: int | None = None
    tie_word_embeddings: bool = False

    @property
    def head_size(self) -> int:
        """D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_parameters(self) -> int:
        """Of the matrix products of all layers."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        per_layer = self.hidden_size * (heads * self.head_size + 3 * self.intermediate_size)
        return self.num_hidden_layers * per_layer

    @property
    def parameters(self) -> int:
        """All, embeddings included."""
        return self.layer_parameters + self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)


def _shape(width: int, inner: int, layers: int, heads: int, kv_heads: int, words: int, tied: bool = False) -> ModelShape:
    return ModelShape(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, head_dim=128, tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES = {
    "qwen2.5-3b": _shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, 152064),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256),
    "qwen2.5-32b": _shape(5120, 27648, 64, 40, 8, 152064),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256),
}


def load_shape(name: str) -> ModelShape:
    """A named shape, or that of a folder with ``config.json``.

    Raises:
        SparseRingError: neither.
    """
    if name in SHAPES:
        return SHAPES[name]
    file = Path(name) / "config.json"
    if not file.is_file():
        raise SparseRingError(f"model: {name!r} is neither a folder with config.json nor one of {', '.join(SHAPES)}")
    return ModelShape(**json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Job:
    """What is to be trained on what.

    Attributes:
        tokens: of a sequence. world: GPUs. density: active share of the causal pairs (1 for the full index); columns: share of
            all causal pairs that are columns. zero_stage: 0 to 3. loss_tile: tokens whose logits exist at once.
    """

    model: ModelShape
    hardware: Hardware
    config: SparseRingConfig
    tokens: int
    world: int
    density: float
    columns: float
    zero_stage: int = 3
    loss_tile: int = 4096


class Schedule(NamedTuple):
    """Who exchanges what with whom: the configuration's ``ulysses_degree``, ``inner_degree`` and ``inner``."""

    ulysses: int = 1
    inner: int | None = None
    kind: InnerKind = "ring"

    def name(self, size: int) -> str:
        """As a table shows it; ``size``: ranks that share a sequence."""
        ring = size // self.ulysses
        inner = ring if self.inner is None else self.inner
        parts = [f"Ulysses {self.ulysses}"] * (self.ulysses > 1)
        if self.kind == "gather":
            parts += [f"ring of {ring // inner}"] * (inner < ring) + [f"gather of {inner}"]
        else:
            parts += [f"ring of {ring}" if self.inner is None else f"ring of {ring // inner} x {inner}"]
        return " x ".join(parts)


@dataclass(frozen=True)
class Estimate:
    """One schedule of a job: times of one step (ms) and bytes of one rank, on the device and offloaded."""

    schedule: Schedule
    forward: PassTime
    backward: PassTime
    index_ms: float
    exchange_ms: float
    columns_ms: float
    rest_ms: float
    layers: int
    memory: float
    host_memory: float
    report: PlanReport

    @property
    def attention_ms(self) -> float:
        """Of all layers, both passes, heads exchanged, columns waited for and index chosen."""
        return self.layers * (self.forward.total + self.backward.total + self.index_ms + self.exchange_ms + self.columns_ms)

    @property
    def step_ms(self) -> float:
        """Of a step of one sequence per data rank."""
        return self.attention_ms + self.rest_ms

    @property
    def exposed(self) -> float:
        """Share of attention's time that ranks wait for transfers and columns or exchange heads."""
        waiting = self.forward.exposed + self.backward.exposed + self.exchange_ms + self.columns_ms
        return self.layers * waiting / self.attention_ms


def schedules(job: Job) -> list[Schedule]:
    """What the job's ranks and heads allow: flat rings, inner rings of a node, and all of a node's shards gathered at once."""
    size = job.config.check_degree(job.world)
    found = []
    for ulysses in (n for n in range(1, size + 1) if size % n == 0 and n <= job.hardware.node_ranks):
        try:
            job.config.model_copy(update={"ulysses_degree": ulysses}).check_heads(
                job.model.num_attention_heads, job.model.num_key_value_heads
            )
        except SparseRingError:
            continue
        ring, within = size // ulysses, job.hardware.node_ranks // ulysses
        found.append(Schedule(ulysses))
        if 1 < within < ring and ring % within == 0:
            found.append(Schedule(ulysses, within))
        if (gathered := min(within, ring)) > 1 and ring % gathered == 0:
            found.append(Schedule(ulysses, gathered, "gather"))
    return found


def estimate(job: Job, schedule: Schedule) -> Estimate:
    """One schedule.

    Raises:
        SparseRingError: heads or ranks that do not divide, naming what would.
    """
    model, hardware, (ulysses, inner, kind) = job.model, job.hardware, schedule
    degrees = {"ulysses_degree": ulysses, "inner_degree": inner, "inner": kind}
    config = SparseRingConfig(**{**job.config.model_dump(), **degrees})
    size = config.check_degree(job.world)
    config.check_heads(model.num_attention_heads, model.num_key_value_heads)
    layout = Layout.for_blocks(config.layout, size, -(-job.tokens // BLOCK), ulysses).over_groups()
    heads, kv_heads = model.num_attention_heads // ulysses, max(1, model.num_key_value_heads // ulysses)
    shard = 2 * kv_heads * layout.local_tokens * model.head_size
    offload = config.offload
    page_blocks = None if offload is None or offload.kv_page_tokens is None else offload.kv_page_tokens // BLOCK
    full = isinstance(config.selector, FullSelector)
    rates = (hardware.dense_forward, hardware.dense_backward) if full else (hardware.sparse_forward, hardware.sparse_backward)

    def attention(flops: int, rate: float, *, backward: bool) -> PassTime:
        pair_ms = flops * model.head_size * heads / rate / 1e9
        work = Work(pair_ms, job.density, job.columns, _BF16 * shard, _FP32 * shard)
        links = Links.of(hardware, ulysses)
        return simulate_pass(layout, inner, work, links, backward=backward, kind=kind, page_blocks=page_blocks)

    forward, backward = attention(4, rates[0], backward=False), attention(10, rates[1], backward=True)
    # a page's hops and transfers are the same for any number of blocks, the buffers for any number of pages from 3 on
    share = 1.0 if page_blocks is None else min(1.0, page_blocks / layout.blocks_per_rank)
    pages = min(3, math.ceil(1 / share))
    report = check_plans(Layout.for_blocks(layout.kind, layout.ranks, 2 * pages * layout.ranks), inner, kind, 2)
    local = layout.local_tokens // ulysses
    return Estimate(
        schedule,
        forward,
        backward,
        index_ms=0.0 if full else hardware.index_share * (forward.compute + backward.compute),
        exchange_ms=_exchange_ms(job, ulysses, local),
        columns_ms=_columns_ms(job, _rows(job, heads, kv_heads), shard, layout.ranks, forward, backward),
        rest_ms=8 * (model.layer_parameters + model.vocab_size * model.hidden_size) * local / hardware.rest / 1e9,
        layers=model.num_hidden_layers,
        memory=_memory(job, local, share * _BF16 * shard, report) + _column_bytes(job, heads, kv_heads, layout.ranks),
        host_memory=(_kept(job, local) if offload is not None else 0.0) + (_BF16 * shard if page_blocks is not None else 0.0),
        report=report,
    )


def _exchange_ms(job: Job, ulysses: int, local: int) -> float:
    """Heads for tokens and back, forward and backward: q, k, v, o, their gradients, and q, k, v again in the replay."""
    if ulysses == 1:
        return 0.0
    model = job.model
    kv_heads = max(model.num_key_value_heads, ulysses)
    qkv = (model.num_attention_heads + 2 * kv_heads) * local * model.head_size * _BF16
    o = model.num_attention_heads * local * model.head_size * _BF16
    sent = (2 * (qkv + o) + qkv + 2 * o) * (ulysses - 1) / ulysses
    return 10 * job.hardware.latency_ms + sent / job.hardware.inner_gb_s / 1e6


def _columns(job: Job, heads: int) -> float:
    """Columns of all segments and heads of a layer, each read by the queries of its segment; every rank has all of them."""
    return heads * job.columns * job.tokens**2 / 2 / min(job.tokens, job.config.segment_tokens or job.tokens)


def _rows(job: Job, heads: int, kv_heads: int) -> float:
    """Distinct rows (key/value head, token) of a layer's columns, as many as columns in random places name.

    Fewer in practice, where heads of a group and segments agree on tokens.
    """
    rows = kv_heads * job.tokens
    return -rows * math.expm1(-_columns(job, heads) / rows)


def _column_bytes(job: Job, heads: int, kv_heads: int, ranks: int) -> float:
    """Tokens of the columns of all layers; of the layer at work their keys and values, gathered, and gradients, also as rows."""
    size = 2 * job.model.head_size
    travelling = _rows(job, heads, kv_heads) * size * _FP32 if ranks > 1 else 0.0
    return _columns(job, heads) * (_INT64 * job.model.num_hidden_layers + size * (_BF16 + _FP32)) + travelling


def _columns_ms(job: Job, rows: float, shard: int, ranks: int, forward: PassTime, backward: PassTime) -> float:
    """What gathering distinct rows, and sharing out their gradients' sums, take beyond the hops beside: all but one of a pass.

    Args:
        shard: elements of a rank's keys and values, which the hops send over the same links.
    """
    if ranks == 1:
        return 0.0
    machine = job.hardware
    rate = min(machine.inner_gb_s, machine.node_ranks * machine.outer_gb_s) * 1e6  # bytes/ms; all links of a node take part
    waits = 0.0
    for run, element, of_hops in ((forward, _BF16, _BF16), (backward, _FP32, _BF16 + _FP32)):
        sent = (ranks - 1) / ranks * 2 * rows * job.model.head_size * element + (ranks - 1) * shard * of_hops
        waits += max(0.0, machine.latency_ms + sent / rate - run.total * (ranks - 1) / ranks)
    return waits if rows else 0.0


def _kept(job: Job, local: int) -> float:
    """Inputs and attention outputs of all checkpointed layers."""
    model = job.model
    attention = model.num_attention_heads * model.head_size
    return model.num_hidden_layers * local * (model.hidden_size + attention) * _BF16


def _memory(job: Job, local: int, page_bytes: float, report: PlanReport) -> float:
    """Weights, gradients and optimizer as ZeRO divides them; kept layer inputs and attention outputs; one layer at work."""
    model, world, stage = job.model, job.world, job.zero_stage
    weights, gradients, optimizer = (world if stage >= least else 1 for least in (3, 2, 1))
    states = _BF16 / weights + _BF16 / gradients + _OPTIMIZER_BYTES / optimizer
    attention = model.num_attention_heads * model.head_size
    kept = _kept(job, local)
    if job.config.offload is not None:  # only what is on its way: out, or back for the layers that are next
        kept *= min(1.0, _IN_FLIGHT_LAYERS / model.num_hidden_layers)
    layer = local * (6 * model.hidden_size + 3 * attention + 7 * model.intermediate_size) * _BF16
    buffers = report.backward.kv_buffers * page_bytes + report.backward.gradient_buffers * 2 * page_bytes
    logits = min(local, job.loss_tile) * model.vocab_size * (_BF16 + 2 * _FP32)
    return states * model.parameters + kept + layer + buffers + logits
