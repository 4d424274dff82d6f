"""Bytes of one rank at its fullest, per tier: what is alive when, counted in Transformers' layers and in this package.

A step is fullest in the backward pass of a layer, or where the last layer chooses its index. Alive are then the states, what
layers keep (by the same `ladder` that training runs with), that layer's tensors, and attention's own. Half precision with master
weights in fp32 is assumed, and layers that are checkpointed. Left out is what is not the allocator's: CUDA's context, NCCL's
buffers, fragmentation; 1 to 3 GiB.

Tensors of a layer are counted in elements per token: W hidden size, I intermediate size, A = heads x head size, KV of all heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ds_sparse_ring.config import EveryQuerySelector, FixedSelector, FullSelector, SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.hardware import Hardware
from ds_sparse_ring.job import Job, ModelShape, Schedule, schedules
from ds_sparse_ring.kernels.contract import columns_at_once, heads_of_sums
from ds_sparse_ring.ladder import Budgets, KeptBytes, Ladder, make_ladder
from ds_sparse_ring.layout import BLOCK, Layout, LayoutKind
from ds_sparse_ring.memory_selection import every_query_bytes, report_bytes
from ds_sparse_ring.plan import InnerKind
from ds_sparse_ring.plan_check import PlanReport, check_plans
from ds_sparse_ring.units import GIB

_BF16, _FP32, _INT64 = 2, 4, 8
_LOGIT_BYTES = 3 * _FP32
"""Of a word of a tile in the loss's backward pass: log-softmax, its gradient and that of the logits."""

_TOLERANCE = 1.1
"""Predictions were at most 5 % above what was measured."""

MAX_SEQUENCE_UNIT = 4096
"""Tokens; `longest_sequence` answers with a multiple."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parts: on the device, by what they are. host, disk: outside of it. recomputed: layers whose output is not kept.
        again: how often the backward pass attends for them: a layer whose output is made for a later layer's input, too.
        misfit: why what layers keep finds no room in the tiers of ``offload`` (``host`` is then what it would take), or "".
    """

    parts: Mapping[str, float]
    host: float
    disk: float
    recomputed: int
    again: int
    misfit: str = ""

    @property
    def device(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    def misfits(self, hardware: Hardware) -> list[str]:
        """What does not fit, as text; empty if all does."""
        found = [self.misfit] * bool(self.misfit)
        for name, needed, gib in (("device", self.device, hardware.memory_gib), ("host", self.host, hardware.host_gib)):
            if needed > gib * GIB:
                found.append(f"{name} memory: {needed / GIB:.1f} of {gib:g} GiB a rank")
        return found


def kept_bytes(model: ModelShape, config: SparseRingConfig, ulysses: int) -> KeptBytes:
    """What a layer keeps of a token in half precision."""
    kv_heads = max(model.num_key_value_heads, ulysses)
    return KeptBytes.of_token(
        model.num_hidden_layers, model.hidden_size, model.num_attention_heads, kv_heads, model.head_size,
        paged=config.page_tokens is not None, inputs_every=config.layer_inputs_every,
    )  # fmt: skip


def ring_layout(job: Job, schedule: Schedule) -> Layout:
    """Over the ring: a Ulysses group counts as one rank."""
    size = job.config.check_degree(job.world)
    return Layout.for_blocks(job.config.layout, size, -(-job.tokens // BLOCK), schedule.ulysses).over_groups()


def plan_report(job: Job, schedule: Schedule) -> PlanReport:
    """Hops, transfers and buffers of a schedule: a page's are the same for any number of blocks.

    Buffers are the same for any number of pages from 3 on.
    """
    ranks = job.config.check_degree(job.world) // schedule.ulysses
    pages = min(3, math.ceil(1 / page_share(job, schedule)))
    return _checked(job.config.layout, ranks, schedule.inner, schedule.kind, pages)


def page_share(job: Job, schedule: Schedule) -> float:
    """Of a shard of keys and values, what a page is; 1 without pages."""
    tokens = job.config.page_tokens
    return 1.0 if tokens is None else min(1.0, tokens / ring_layout(job, schedule).local_tokens)


@lru_cache(maxsize=256)
def _checked(kind: LayoutKind, ranks: int, inner: int | None, how: InnerKind, pages: int) -> PlanReport:
    return check_plans(Layout.for_blocks(kind, ranks, 2 * pages * ranks), inner, how, 2)


def memory_of(job: Job, schedule: Schedule) -> Memory:
    """One schedule of a job.

    Raises:
        SparseRingError: heads or ranks that do not divide, naming what would.
    """
    model, n = job.model, ring_layout(job, schedule).local_tokens // schedule.ulysses
    on_device, host, disk = _states(job)
    kept = kept_bytes(model, job.config, schedule.ulysses)
    ladder, misfit = _ladder(job, kept, n)
    attends_again = ladder is not None and ladder.recomputed > 0 or job.config.checkpoint == "index"
    layer = max(_layer(job, schedule, n, attends_again), _loss(job, n), _choosing(job, schedule, n))
    columns = columns_of(job, model.num_attention_heads // schedule.ulysses)
    parts = {
        **on_device,
        "kept by layers": _kept_on_device(job, ladder, kept.of_shard(n)),
        "one layer at work": layer,
        "tokens of columns": columns * _INT64 * model.num_hidden_layers,
        "rotary tables": 2 * n * model.head_size * _BF16,
    }
    recomputed = model.num_hidden_layers if job.config.checkpoint == "index" else 0 if ladder is None else ladder.recomputed
    if ladder is not None:
        host += ladder.used("host") + (ladder.budgets.staging if ladder.budgets.disk and not misfit else 0)
        disk += ladder.used("disk")
    return Memory(parts, host, disk, recomputed, recomputed + layers_before_others(job, recomputed), misfit)


def layers_before_others(job: Job, first: int) -> int:
    """Of so many first layers, those that run forward again for the inputs of later ones (``layer_inputs_every``)."""
    every, layers = job.config.layer_inputs_every, job.model.num_hidden_layers
    return sum((layer + 1) % every > 0 for layer in range(min(first, layers - 1)))


def columns_of(job: Job, heads: int) -> float:
    """Columns of all segments and patterns of a layer, each read by the queries of its segment; every rank has their tokens.

    The fixed selector says how many; otherwise they follow from the share of pairs that they are.
    """
    selector, segment = job.config.selector, min(job.tokens, job.config.segment_tokens or job.tokens)
    patterns = patterns_of(job, heads)
    if isinstance(selector, FixedSelector):
        return patterns * sum(min(selector.columns, end) for end in range(segment, job.tokens + segment, segment))
    return patterns * job.columns * job.tokens**2 / 2 / segment


def patterns_of(job: Job, heads: int) -> float:
    """Of ``heads`` query heads."""
    kv_heads = max(1, job.model.num_key_value_heads * heads // job.model.num_attention_heads)
    return heads / (job.config.heads_per_pattern or heads // kv_heads)


def slots_of(job: Job, heads: int) -> float:
    """Words of 64 bits in which every query marks its keys: each segment's reach back to the first token, in each pattern."""
    segment = min(job.tokens, job.config.segment_tokens or job.tokens)
    ends = range(segment, job.tokens + segment, segment)
    return patterns_of(job, heads) * sum(-(-min(end, job.tokens) // BLOCK) for end in ends)


def column_parts(job: Job, heads: int) -> int:
    """How many parts these columns are done in, one after the other; a part may have a single row (segment, pattern) at least."""
    columns, selector = columns_of(job, heads), job.config.selector
    row = min(selector.columns, job.tokens) if isinstance(selector, FixedSelector) else job.columns * job.tokens
    return max(1, math.ceil(columns / max(row, columns_at_once(job.model.head_size, torch.bfloat16))))


def rows_of(job: Job, heads: int, kv_heads: int) -> float:
    """Distinct rows (key/value head, token) of a part of a layer's columns, as many as columns in random places name.

    Fewer in practice, where heads of a group and segments agree on tokens.
    """
    rows = kv_heads * job.tokens
    return -rows * math.expm1(-columns_of(job, heads) / column_parts(job, heads) / rows)


def _states(job: Job) -> tuple[dict[str, float], float, float]:
    """Weights, gradients and optimizer as ZeRO divides them: on the device, in host memory, on the disk.

    With the optimizer outside the device its gradients go there in fp32, through a buffer in half precision.
    """
    model, world, stage = job.model, job.world, job.zero_stage
    trained = job.trained_share * model.parameters
    places = dict.fromkeys(("device", "host", "disk"), 0.0)
    weights = _BF16 * model.parameters / (world if stage >= 3 else 1)
    gradients = _BF16 * trained / (world if stage >= 2 else 1)
    optimizer = job.optimizer_bytes * trained / (world if stage >= 1 else 1)
    if job.optimizer_on != "device":
        places["host"] += (_FP32 + _BF16) * trained / world
        gradients = 0.0 if stage >= 2 else gradients
    for nbytes, place in ((weights, job.weights_on), (gradients, "device"), (optimizer, job.optimizer_on)):
        places[place] += nbytes
    words = model.vocab_size * model.hidden_size
    parts = {"states": places["device"]}
    if stage >= 3:  # this layer's, the next one's, and embeddings
        # DeepSpeed keeps frozen weights of layers that run again until the layer for whose input they did has run backward
        layers = 2 if job.trained_share == 1 else 1 + job.config.layer_inputs_every
        gathered = layers * model.layer_parameters / model.num_hidden_layers + words
        parts["weights gathered"] = _BF16 * min(gathered, model.parameters)
    if model.tie_word_embeddings and job.trained_share == 1:
        parts["gradient of tied embeddings"] = _BF16 * words  # from the first layer to run backward to the last one
    return parts, places["host"], places["disk"]


def ladder_of(job: Job, schedule: Schedule) -> Ladder | None:
    """Where layers keep what, None without ``offload``; if inputs do not fit, with a host that is large enough."""
    local = ring_layout(job, schedule).local_tokens // schedule.ulysses
    return _ladder(job, kept_bytes(job.model, job.config, schedule.ulysses), local)[0]


def _ladder(job: Job, kept: KeptBytes, n: int) -> tuple[Ladder | None, str]:
    """As training makes it; if inputs do not fit, that of a host that is large enough, and the error."""
    if job.config.offload is None:
        return None, ""
    budgets, outputs = Budgets.of(job.config.offload), job.config.checkpoint == "output"
    try:
        return make_ladder(kept, n, budgets, keep_outputs=outputs), ""
    except SparseRingError as error:
        shard = kept.of_shard(n)
        enough = shard.pages + shard.inputs * shard.input + shard.layers * sum(shard.output)
        return make_ladder(kept, n, replace(budgets, host=enough), keep_outputs=outputs), str(error)


def _kept_on_device(job: Job, ladder: Ladder | None, shard: KeptBytes) -> float:
    """All of it without a ladder; with one what it puts there or, if that is more, what is fetched for this layer and ahead.

    With the inputs of a group of layers that were made again and wait for their layers.
    """
    total: float = (min(shard.inputs_every, shard.layers) - 1) * shard.input
    if ladder is None:
        outputs = shard.layers * sum(shard.output) if job.config.checkpoint == "output" else 0
        return total + shard.inputs * shard.input + outputs
    fetched = 2 if ladder.recomputed < shard.layers else 3  # the next two tensors come early
    for places, nbytes in ((ladder.inputs, shard.input), (ladder.outputs, sum(shard.output))):
        outside = sum(place in ("host", "disk") for place in places)
        total += nbytes * max(places.count("device"), min(outside, fetched))
    return total


def _layer(job: Job, schedule: Schedule, n: int, attends_again: bool) -> float:
    """A decoder layer's backward pass where it is fullest, without input and attention output that were kept."""
    model = job.model
    w, i, a, of_kv = _widths(model, schedule)
    chunk = job.config.layer_chunk_tokens
    attention = _attention(job, schedule, n)
    heads = model.num_attention_heads // schedule.ulysses
    parts = column_parts(job, heads)
    columns = columns_of(job, heads) * 2 * model.head_size * _BF16 if parts == 1 else 0  # which the backward pass finds
    own_output = n * (_BF16 * a + _FP32 * model.num_attention_heads) if attends_again else 0
    # saved by a norm: its input in fp32, the normalised one and the result; in an MLP's backward pass gate, its activation, up
    # and the gradients of product, activation and up
    norm, mlp = 4 * w, 6 * i
    kv = of_kv if job.config.page_tokens is None or parts > 1 else 0
    if chunk is None:
        in_mlp = _BF16 * n * (2 * norm + a + kv + a + mlp + w) + columns
        in_attention = _BF16 * n * (norm + a + kv + w) + attention
        return max(in_mlp, in_attention) + own_output
    c = min(chunk, n)
    per_layer = model.layer_parameters / model.num_hidden_layers * job.trained_share
    sums = _FP32 * per_layer
    whole = 2 * w + a + kv  # gradients of output and input; q, k, v
    after = _BF16 * (n * (whole + a) + c * (norm + 4 * w + 2 * a + mlp)) + columns
    gradients = a + of_kv * (2 if shares_kv_heads(job, schedule) else 1)  # of shared heads in fp32, until these are summed
    before = _BF16 * (n * (2 * w + gradients) + c * (norm + w + 2 * gradients)) + _BF16 * per_layer
    return max(after, _BF16 * n * whole + attention, before) + sums + own_output


def exchanges_at_once(job: Job, schedule: Schedule) -> bool:
    """Whether a Ulysses group exchanges all heads before and after attention, so that queries and outputs are there twice.

    Layers in chunks exchange them chunk by chunk.
    """
    return schedule.ulysses > 1 and job.config.layer_chunk_tokens is None


def shares_kv_heads(job: Job, schedule: Schedule) -> bool:
    """Whether several ranks of a Ulysses group have the same KV head, whose gradients are summed over them in fp32."""
    return schedule.ulysses > job.model.num_key_value_heads


def _widths(model: ModelShape, schedule: Schedule) -> tuple[int, int, int, int]:
    """W, I, A, and of keys and values together, repeated where a Ulysses group has more ranks than there are KV heads."""
    kv_heads = max(model.num_key_value_heads, schedule.ulysses)
    attention = model.num_attention_heads * model.head_size
    return model.hidden_size, model.intermediate_size, attention, 2 * kv_heads * model.head_size


def _attention(job: Job, schedule: Schedule, n: int) -> float:
    """What attention's backward pass adds to q, k, v, output and its log-sum-exp.

    do and dq (summed in fp32 over hops and parts of columns), both twice where a Ulysses group exchanges them at once; sums of dq
    by the CUDA kernels without either; delta; shards of keys and values and their gradients on the way; with parts beside hops
    the parts' gradients apart, in fp32, as those of whole pages are with parts or with KV heads that ranks share; keys and values
    of the columns, or of a part of them, with their gradients, on a ring also the distinct rows of these.
    """
    model, report = job.model, plan_report(job, schedule)
    *_, a, kv = _widths(model, schedule)
    share = page_share(job, schedule)
    ring = job.config.check_degree(job.world) > schedule.ulysses
    heads, kv_heads = model.num_attention_heads // schedule.ulysses, max(1, model.num_key_value_heads // schedule.ulysses)
    parts = column_parts(job, heads)
    merged, at_once = ring or share < 1 or parts > 1, exchanges_at_once(job, schedule)
    elements = 2 * a + (2 * a if merged else 0) + (2 * a if at_once else 0)
    whole_pages = share < 1 and (parts > 1 or shares_kv_heads(job, schedule))
    elements += 2 * kv * ((parts > 1 and (ring or share < 1)) + whole_pages)
    buffers = share * (report.backward.kv_buffers + 2 * report.backward.gradient_buffers)
    columns = columns_of(job, heads) / parts * 2 * model.head_size * (_BF16 + _FP32)
    of_kv_head = _FP32 * n * schedule.ulysses * model.head_size * heads // kv_heads
    apart = not merged and job.config.backend in ("auto", "cuda")
    sums = of_kv_head * heads_of_sums(kv_heads, of_kv_head) if apart else 0
    if ring:
        columns += rows_of(job, heads, kv_heads) * 2 * model.head_size * _FP32
    return n * (_BF16 * (elements + buffers * kv) + _FP32 * model.num_attention_heads) + columns + sums


def _choosing(job: Job, schedule: Schedule, n: int) -> float:
    """The forward pass where a layer's index is chosen: q, k, v, and what `memory_selection` counts.

    Where a Ulysses group exchanges these at once they are there twice.
    Whole layers hold the normalised input, too. Looking for scores that are not finite takes as much as q twice.
    """
    model, config = job.model, job.config
    if isinstance(config.selector, FullSelector):
        return 0.0
    w, _, a, kv = _widths(model, schedule)
    heads = model.num_attention_heads // schedule.ulysses
    columns = columns_of(job, heads)
    chosen = report_bytes(columns)
    if isinstance(config.selector, EveryQuerySelector):
        keys = _BF16 * kv / 2 / schedule.ulysses * job.tokens
        ranks = config.check_degree(job.world) // schedule.ulysses
        chosen = max(chosen, every_query_bytes(columns, slots_of(job, heads), keys, ranks), _BF16 * n * 2 * a)
    at_once = exchanges_at_once(job, schedule)
    inputs = (0 if config.layer_chunk_tokens else w) + (a + kv) * (2 if at_once else 1)
    return _BF16 * n * inputs + chosen


def _loss(job: Job, n: int) -> float:
    """The last layer and the loss on a tile, with the hidden states and their gradients."""
    return min(n, job.loss_tile) * job.model.vocab_size * _LOGIT_BYTES + 2 * n * job.model.hidden_size * _BF16


def refuse_misfit(job: Job, schedule: Schedule, device_bytes: float | None, host_bytes: float | None = None) -> None:
    """Refuse what cannot be trained, before it costs anything: a prediction far above the device, or inputs without room.

    Args:
        job: what will run; ``hardware`` and ``density`` are not looked at. device_bytes: of the device; None: it is not checked.
        host_bytes: of host memory, that a rank may have at most; None: it is not checked.

    Raises:
        SparseRingError: naming bytes and ways out.
    """
    memory = memory_of(job, schedule)
    if memory.misfit:
        raise SparseRingError(memory.misfit)
    if host_bytes is not None and memory.host > host_bytes:
        raise SparseRingError(
            f"{job.tokens} tokens on {job.world} ranks need about {memory.host:.0f} bytes ({memory.host / GIB:.1f} GiB) of "
            f"host memory each, and this container or job may have {host_bytes:.0f} ({host_bytes / GIB:.1f} GiB) for each: "
            "raise that limit, lower sparse_ring.offload.host_gib (with disk_path, or more ranks to a sequence), or offload less "
            "of ZeRO's states"
        )
    if device_bytes is None or memory.device <= _TOLERANCE * device_bytes:
        return
    parts = ", ".join(f"{name} {nbytes:.0f}" for name, nbytes in sorted(memory.parts.items(), key=lambda part: -part[1]))
    ways = [
        "more ranks to a sequence (degree)",
        *["a higher ZeRO stage"] * (job.zero_stage < 3),
        *["sparse_ring.layer_chunk_tokens (16384)"] * (job.config.layer_chunk_tokens is None),
        *["sparse_ring.offload.host_gib"] * (job.config.offload is None),
        *["zero_optimization.offload_optimizer"] * (job.optimizer_on == "device"),
        "shorter sequences",
    ]
    raise SparseRingError(
        f"{job.tokens} tokens on {job.world} ranks need about {memory.device:.0f} bytes ({memory.device / GIB:.1f} GiB) of each "
        f"device, which has {device_bytes:.0f} ({device_bytes / GIB:.1f} GiB): {parts}. Ways out: {', '.join(ways)}; "
        "`ds-sparse-ring plan --max-seq` shows what would fit"
    )


def longest_sequence(job: Job) -> tuple[int, Schedule | None, list[str]]:
    """The longest sequence that fits, a multiple of `MAX_SEQUENCE_UNIT` tokens, over all schedules of a job.

    Returns:
        Tokens (0 if none fits), the schedule, and what does not fit for the next longer one.
    """
    found = [(*_longest(job, schedule), schedule) for schedule in schedules(job)]
    units, reasons, schedule = max(found, key=lambda each: each[0])
    return units * MAX_SEQUENCE_UNIT, schedule if units else None, reasons


def _longest(job: Job, schedule: Schedule) -> tuple[int, list[str]]:
    def misfits(units: int) -> list[str]:
        return memory_of(replace(job, tokens=units * MAX_SEQUENCE_UNIT), schedule).misfits(job.hardware)

    low, high = 0, 1
    while not misfits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if misfits(middle) else (middle, high)
    return low, misfits(high)
