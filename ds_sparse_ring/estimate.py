"""Step time and memory of a training set-up before it is launched, for every schedule that the set-up allows.

Attention is simulated from the plans (`simulate`); everything else is FLOPs over a rate, and bytes. What ZeRO sends is left out:
it overlaps with long sequences; so are row sums of do * o. Times in ms, sizes in bytes, of one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_sparse_ring.config import EveryQuerySelector, FixedSelector, FullSelector, SparseRingConfig
from ds_sparse_ring.exposed_copies import exposed_copies_ms
from ds_sparse_ring.hardware import Rate, rate_at
from ds_sparse_ring.job import Job, Schedule
from ds_sparse_ring.layout import BLOCK, Layout
from ds_sparse_ring.memory import (
    Memory,
    column_parts,
    columns_of,
    ladder_of,
    layers_before_others,
    memory_of,
    patterns_of,
    plan_report,
    ring_layout,
    rows_of,
    shares_kv_heads,
    slots_of,
)
from ds_sparse_ring.meter import SENT
from ds_sparse_ring.plan_check import PlanReport
from ds_sparse_ring.simulate import Links, PassTime, Work, simulate_pass

_BF16, _FP32, _INT64 = 2, 4, 8


@dataclass(frozen=True)
class Estimate:
    """One schedule of a job: times of one step (ms) and memory of one rank.

    Attributes:
        heads_bytes, columns_bytes: what a rank sends in a step, of heads within Ulysses groups, of columns and their gradients.
    """

    schedule: Schedule
    forward: PassTime
    backward: PassTime
    index_ms: float
    exchange_ms: float
    columns_ms: float
    moved_ms: float
    rest_ms: float
    copies_ms: float
    heads_bytes: float
    columns_bytes: float
    layers: int
    memory: Memory
    report: PlanReport

    @property
    def attention_ms(self) -> float:
        """Of all layers, both passes, heads exchanged, columns waited for and moved, index chosen; outputs not kept again."""
        per_layer = self.forward.total + self.backward.total + self.index_ms + self.exchange_ms + self.columns_ms + self.moved_ms
        return self.layers * per_layer + self.memory.again * self.forward.total

    @property
    def step_ms(self) -> float:
        """Of a step of one sequence per data rank; copies to host memory and the disk as far as nothing hides them."""
        return self.attention_ms + self.rest_ms + self.copies_ms

    @property
    def sent_bytes(self) -> dict[str, float]:
        """What leaves a rank in such a step, by the names of `meter.SENT`."""
        forward, backward, times = self.forward.sent, self.backward.sent, self.layers + self.memory.again
        inner, outer = (times * forward[level] + self.layers * backward[level] for level in ("inner", "outer"))
        return dict(zip(SENT, (inner, outer, self.heads_bytes, self.columns_bytes), strict=True))

    @property
    def exposed(self) -> float:
        """Share of attention's time that ranks wait for transfers and columns or exchange heads."""
        waiting = self.forward.exposed + self.backward.exposed + self.exchange_ms + self.columns_ms
        return self.layers * waiting / self.attention_ms


def estimate(job: Job, schedule: Schedule, same_attention: Estimate | None = None) -> Estimate:
    """One schedule.

    Args:
        same_attention: of the same schedule and pages with another ``layer_chunk_tokens``; its passes are not simulated again.

    Raises:
        SparseRingError: heads or ranks that do not divide, naming what would.
    """
    model, hardware, (ulysses, inner, kind) = job.model, job.hardware, schedule
    degrees = {"ulysses_degree": ulysses, "inner_degree": inner, "inner": kind}
    config = SparseRingConfig(**{**job.config.model_dump(), **degrees})
    config.check_degree(job.world)
    config.check_heads(model.num_attention_heads, model.num_key_value_heads)
    layout = ring_layout(job, schedule)
    heads, kv_heads = model.num_attention_heads // ulysses, max(1, model.num_key_value_heads // ulysses)
    shard = 2 * kv_heads * layout.local_tokens * model.head_size
    page_blocks = None if config.page_tokens is None else config.page_tokens // BLOCK
    rates = _attention_rates(job, heads, layout)

    def attention(flops: int, rate: float, *, backward: bool) -> PassTime:
        pair_ms = flops * model.head_size * heads / rate / 1e9
        work = Work(pair_ms, job.density, job.columns, _BF16 * shard, _FP32 * shard)
        links = Links.of(hardware, ulysses)
        return simulate_pass(layout, inner, work, links, backward=backward, kind=kind, page_blocks=page_blocks)

    if same_attention is None:
        forward, backward = attention(4, rates[0], backward=False), attention(10, rates[1], backward=True)
    else:
        forward, backward = same_attention.forward, same_attention.backward
    local, report, memory = layout.local_tokens // ulysses, plan_report(job, schedule), memory_of(job, schedule)
    index_ms, rest_ms = _index_ms(job, heads, kv_heads, layout.ranks, forward.compute + backward.compute), _rest_ms(job, local)
    return Estimate(
        schedule,
        forward,
        backward,
        index_ms=index_ms,
        exchange_ms=_exchange_ms(job, schedule, local),
        columns_ms=_columns_ms(job, heads, kv_heads, layout, forward, backward),
        moved_ms=_moved_ms(job, heads),
        rest_ms=rest_ms,
        copies_ms=_copies_ms(job, schedule, rest_ms, index_ms, forward, backward),
        heads_bytes=model.num_hidden_layers * _heads_bytes(job, schedule, local),
        columns_bytes=_columns_bytes(job, heads, kv_heads, layout.ranks, memory),
        layers=model.num_hidden_layers,
        memory=memory,
        report=report,
    )


def _attention_rates(job: Job, heads: int, layout: Layout) -> tuple[float, float]:
    """Forward and backward, of a rank's ``heads`` on a ring's layout."""
    machine = job.hardware
    if not isinstance(job.config.selector, FullSelector):
        forward, backward = (_sparse_rate(job, heads, layout, rate) for rate in (machine.sparse_forward, machine.sparse_backward))
        return forward, backward
    return (
        (machine.dense_forward, machine.dense_backward)
        if layout.ranks == 1
        else (machine.ring_dense_forward, machine.ring_dense_backward)
    )


def _sparse_rate(job: Job, heads: int, layout: Layout, rate: Rate) -> float:
    """Of columns and diagonals together. A tile of columns costs the less the more queries read it.

    These are a segment's, for all heads of a pattern; a striped ring gives each rank its share of them.
    """
    segment = min(job.tokens, job.config.segment_tokens or job.tokens)
    here = segment / layout.ranks if layout.kind == "striped" else segment
    of_columns, of_diagonals = rate_at(rate, here * heads / patterns_of(job, heads)), rate_at(rate, math.inf)
    share = job.columns / job.density if job.density else 0.0
    return 1 / (share / of_columns + (1 - share) / of_diagonals)


def _rest_ms(job: Job, local: int) -> float:
    """Of all layers and the loss for ``local`` tokens: 2 FLOPs a weight forward, as many in each replay, 4 backward."""
    model, machine, chunk = job.model, job.hardware, job.config.layer_chunk_tokens
    rate = (machine.liger_rest if job.liger else machine.rest) * (1.0 if chunk is None else rate_at(machine.chunked, chunk))
    layers, words = model.layer_parameters, model.vocab_size * model.hidden_size
    return (8 * (layers + words) + 2 * layers * _again(job)) * local / rate / 1e9


def _again(job: Job) -> float:
    """Share of the layers that run forward again for the inputs of later ones."""
    layers = job.model.num_hidden_layers
    return layers_before_others(job, layers) / layers


def _copies_ms(job: Job, schedule: Schedule, rest_ms: float, index_ms: float, forward: PassTime, backward: PassTime) -> float:
    """Of all layers what is not hidden by a layer's attention, index, and its part of the rest, a quarter of it forward."""
    ladder, model = ladder_of(job, schedule), job.model
    if ladder is None:
        return 0.0
    weights = model.layer_parameters + model.vocab_size * model.hidden_size
    of_layer = rest_ms * model.layer_parameters / weights / model.num_hidden_layers
    forward_ms, backward_ms = forward.total + index_ms + of_layer / 4, backward.total + 3 * of_layer / 4
    return exposed_copies_ms(ladder, job.hardware, forward_ms, backward_ms, forward.total)


def _index_ms(job: Job, heads: int, kv_heads: int, ranks: int, attention_ms: float) -> float:
    """Choosing the index of a layer, for this rank's ``heads`` and its part of a ring."""
    machine, selector = job.hardware, job.config.selector
    if isinstance(selector, FullSelector):
        return 0.0
    if isinstance(selector, EveryQuerySelector):
        pairs = job.tokens * (job.tokens + 1) / 2 / ranks
        scores = 2 * job.model.head_size * heads * pairs / machine.scores / 1e9
        return scores + columns_of(job, heads) / 1e6 * machine.listing_ms + _gathering_ms(job, heads, kv_heads, ranks)
    return attention_ms * (machine.fixed_index_share if isinstance(selector, FixedSelector) else machine.index_share)


def _gathering_ms(job: Job, heads: int, kv_heads: int, ranks: int) -> float:
    """Before every query chooses a ring gathers all keys, and then the bits of all ranks. Nothing runs beside."""
    if ranks == 1:
        return 0.0
    keys = _BF16 * job.model.head_size * kv_heads * job.tokens / ranks
    received = (ranks - 1) * (keys + _INT64 * slots_of(job, heads))
    return 2 * job.hardware.latency_ms + received / _gathering_rate(job)


def _gathering_rate(job: Job) -> float:
    """Bytes/ms of a rank; all links of a node take part."""
    machine = job.hardware
    return min(machine.inner_gb_s, machine.node_ranks * machine.outer_gb_s) * 1e6


def _moved_ms(job: Job, heads: int) -> float:
    """On the device: all columns put in order in both passes, and their gradients' sums put back; a ring's ranks do so each."""
    rate = job.hardware.column_gb_s
    if rate is None:
        return 0.0
    return columns_of(job, heads) * 2 * job.model.head_size * (2 * _BF16 + _FP32) / rate / 1e6


def _exchange_ms(job: Job, schedule: Schedule, local: int) -> float:
    """Heads for tokens and back, of a layer.

    Layers that work on chunks wait for one of them each time; the others are under way beside norms and products.
    """
    if schedule.ulysses == 1:
        return 0.0
    waited_for = min(local, job.config.layer_chunk_tokens or local)
    sent = _heads_bytes(job, schedule, waited_for)
    return 2 * _passes(job) * job.hardware.latency_ms + sent / job.hardware.inner_gb_s / 1e6


def _passes(job: Job) -> float:
    """How often a layer's heads are exchanged, to and fro: forward, backward and in each replay."""
    return 3 + _again(job)


def _heads_bytes(job: Job, schedule: Schedule, tokens: int) -> float:
    """What a rank sends for so many local tokens of a layer: q, k, v, o, their gradients, and q, k, v and o in each replay.

    Gradients of KV heads that ranks share go in fp32, but for a dense library's.
    """
    model, ulysses = job.model, schedule.ulysses
    kv = 2 * max(model.num_key_value_heads, ulysses)
    elements = _passes(job) * (2 * model.num_attention_heads + kv)
    dense = isinstance(job.config.selector, FullSelector) and job.config.check_degree(job.world) == ulysses
    wide = (_FP32 - _BF16) * kv if shares_kv_heads(job, schedule) and not dense else 0
    return tokens * (ulysses - 1) / ulysses * model.head_size * (_BF16 * elements + wide)


def _columns_ms(job: Job, heads: int, kv_heads: int, layout: Layout, forward: PassTime, backward: PassTime) -> float:
    """What gathering distinct rows, and sharing out their gradients' sums, take beyond the hops beside: all but one of a pass.

    Parts of columns are spread over the hops; the backward pass gathers them again.
    """
    ranks, of_columns, parts = layout.ranks, _column_elements(job, heads, kv_heads, layout.ranks), column_parts(job, heads)
    if not of_columns:
        return 0.0
    machine, size, rate = job.hardware, job.model.head_size, _gathering_rate(job)
    of_hops = (ranks - 1) * 2 * kv_heads * layout.local_tokens * size
    again, waits = _BF16 if parts > 1 else 0, 0.0
    for run, element, of_hop in ((forward, _BF16, _BF16), (backward, _FP32 + again, _BF16 + _FP32)):
        sent = of_columns * element + of_hops * of_hop
        waits += max(0.0, parts * machine.latency_ms + sent / rate - run.total * (ranks - 1) / ranks)
    return waits


def _column_elements(job: Job, heads: int, kv_heads: int, ranks: int) -> float:
    """Of a layer's distinct rows, keys and values, that a rank sends to gather them once, and as many to return gradients."""
    return column_parts(job, heads) * (ranks - 1) / ranks * 2 * rows_of(job, heads, kv_heads) * job.model.head_size


def _columns_bytes(job: Job, heads: int, kv_heads: int, ranks: int, memory: Memory) -> float:
    """What a rank sends in a step, all layers, for columns and their gradients.

    They are gathered wherever a layer attends, and for its backward pass, too, if the replay does not attend or they come in
    parts.
    """
    layers = job.model.num_hidden_layers
    gathered = layers + memory.again + (layers if column_parts(job, heads) > 1 else layers - memory.recomputed)
    return _column_elements(job, heads, kv_heads, ranks) * (_BF16 * gathered + _FP32 * layers)
