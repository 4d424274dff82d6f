"""Selection by every query: a key that some query of a segment wants is a column of that segment.

Other selectors ask a segment's last queries, and a key that only the queries before them need is missed: on text that costs more
loss than any budget gives back (docs/measurements.md). Here all queries score all keys, once, and nothing but one bit of a key
is kept of it.

With scaled scores s, query i wants key j if ``exp(s_ij) >= price * Z_ij``. Z is a sum over key blocks, of the largest exp(s_i) in
each: the document's first block, the query's own, and those between its own and j's. It grows from near keys to far ones and
never exceeds the softmax's denominator, so that every key that has at least ``price`` of a query's attention is kept, and a few
more. Largest values, and bits that are or-ed, depend on no order: the index is the same on any number of ranks.

Rows of a rank's queries meet the keys of all ranks, which are gathered: 2 bytes x D x K a token. What leaves a rank is the bits.

Shapes: H query heads, K key/value heads, P patterns, n local tokens, N tokens of the sequence, b local blocks, D head size; row =
segment * P + pattern. Bits stand in *slots*, int64 words of 64 tokens, ascending by row and key block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from ds_sparse_ring.config import EveryQuerySelector, WindowSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import VerticalSlash, segment_of_blocks
from ds_sparse_ring.kernels.contract import Kernel, accumulator_dtype
from ds_sparse_ring.layout import BLOCK, Layout
from ds_sparse_ring.select.blocks import check_finite, local_blocks, of_all_blocks
from ds_sparse_ring.select.static import global_tokens_read, window_index

if TYPE_CHECKING:
    from ds_sparse_ring.kernels.cuda_attention import CudaKernel

Method = Literal["cuda", "triton", "reference"]

_TOGETHER = 1 << 20  # words that are unpacked at a time, 64 bytes each, or exchanged


@dataclass(frozen=True)
class Slots:
    """Where the bits of each row are.

    Attributes:
        ptr: first slot of each row, int64 ``[S * P + 1]``. first_block: the key block of a row's first slot, int64 ``[S * P]``.
        sinks, sink_words: slots that hold first tokens which later blocks read, and those tokens' bits.
        count: number of slots.
    """

    ptr: Tensor
    first_block: Tensor
    sinks: Tensor
    sink_words: Tensor
    count: int


@dataclass(frozen=True)
class LocalRows:
    """This rank's query blocks, int64 ``[b]`` each.

    Attributes:
        block: global number. first: first block of its document. valid: tokens that are not filled up. slot: first slot of its
        segment, pattern 0. reach: slots of a pattern.
    """

    block: Tensor
    first: Tensor
    valid: Tensor
    slot: Tensor
    reach: Tensor


def select_by_every_query(
    selector: EveryQuerySelector, q: Tensor, k: Tensor, context: SequenceContext, scale: float, method: Method
) -> VerticalSlash:
    """The nearest blocks, the first tokens and what any query wants. Collective over the ring.

    Args:
        q: ``[H, n, D]``; k: ``[K, n, D]``. method: what looks at the scores, see `fastest_method`.
    """
    group = context.heads_per_pattern
    patterns = q.shape[0] // group
    check_finite(q, k, context=context)
    window = WindowSelector(window_blocks=selector.window_blocks, sink_tokens=selector.sink_tokens)
    slots = _slots(context.segments, patterns, window, q.device)
    rows = _local_rows(context.layout, context.rank, context.segments, patterns, q.device)
    words = torch.zeros(slots.count, dtype=torch.int64, device=q.device)
    keys = of_all_blocks(k.unflatten(1, (-1, BLOCK)), context).flatten(1, 2)
    _marker(method, context.kernel)(words, q, keys, rows, selector, patterns, scale)
    del keys  # their room is that of the columns now
    _or_over_ring(words, context)
    words[slots.sinks] |= slots.sink_words
    nearest = window_index(window, context, patterns, q.device)  # its diagonals
    columns = _compressed_rows(words, slots)
    return VerticalSlash(context.segments, patterns, group, nearest.diagonal_ptr, nearest.diagonal_values, *columns)


def fastest_method(q: Tensor, kernel: Kernel, scale: float) -> Literal["cuda", "triton"]:
    """On a GPU: the CUDA kernel if attention is done by its backend and it knows such queries, else Triton's."""
    if kernel.name != "cuda":
        return "triton"
    return "cuda" if cast("CudaKernel", kernel).marks_wanted(q, scale) else "triton"


def _marker(
    method: Method, kernel: Kernel
) -> Callable[[Tensor, Tensor, Tensor, LocalRows, EveryQuerySelector, int, float], None]:
    """What sets the bits, with the arguments of `_mark_wanted`."""
    if method == "reference":
        return _mark_wanted
    if method == "cuda":
        return partial(_mark_by_cuda, cast("CudaKernel", kernel))
    from ds_sparse_ring.select.triton_every_query import mark_wanted  # imports Triton

    return mark_wanted


def _mark_by_cuda(
    kernel: CudaKernel,
    words: Tensor,
    q: Tensor,
    keys: Tensor,
    rows: LocalRows,
    selector: EveryQuerySelector,
    patterns: int,
    scale: float,
) -> None:
    tables = [rows.block, rows.first, rows.valid, rows.slot, rows.reach]
    kernel.mark_wanted(words, q, keys, tables, patterns, selector.window_blocks, scale, selector.price)


def _mark_wanted(
    words: Tensor, q: Tensor, keys: Tensor, rows: LocalRows, selector: EveryQuerySelector, patterns: int, scale: float
) -> None:
    """Set the bits of the keys that this rank's queries want; ``keys``: ``[K, N, D]``."""
    kv_heads, _, size = keys.shape
    dtype, heads = accumulator_dtype(q.dtype), q.shape[0]
    log_price = math.log(selector.price)
    numbers = torch.stack([rows.block, rows.first, rows.valid, rows.slot, rows.reach], 1).tolist()
    for local, (block, first, valid, slot, reach) in enumerate(numbers):
        far = block - first + 1 - selector.window_blocks  # key blocks before the window
        if far <= 0:
            continue
        queries = q[:, local * BLOCK : (local + 1) * BLOCK].to(dtype).reshape(kv_heads, -1, size) * scale
        scores = queries @ keys[:, first * BLOCK : (block + 1) * BLOCK].to(dtype).mT
        scores = scores.view(heads, BLOCK, block + 1 - first, BLOCK)
        scores[:, :, -1].masked_fill_(~torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q.device).tril(), float("-inf"))
        limit = _log_sums(scores.amax(-1))[..., :far] + log_price  # [H, T, far]
        wants = (scores[:, :, :far] >= limit[..., None])[:, :valid]
        by_pattern = wants.unflatten(0, (patterns, -1)).any(2).any(1)  # [P, far, T]
        bits = (by_pattern.long() << torch.arange(BLOCK, device=q.device)).sum(-1)
        for pattern in range(patterns):
            begin = slot + pattern * reach
            words[begin : begin + far] |= bits[pattern]


def _log_sums(largest: Tensor) -> Tensor:
    """Logarithms of Z from the largest scores of key blocks ``[..., blocks]``, the document's first to the query's own."""
    near_to_far = torch.cat([largest[..., :1], largest[..., 1:].flip(-1)], -1).logcumsumexp(-1)
    # the first block is looked at when all others have been
    return torch.cat([near_to_far[..., -1:], near_to_far[..., 1:].flip(-1)], -1)


def _or_over_ring(words: Tensor, context: SequenceContext) -> None:
    if context.axes.ring_size > 1:
        for part in words.split(_TOGETHER):
            part.copy_(reduce(torch.bitwise_or, context.axes.ring_gather(part)))


def _compressed_rows(words: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Tokens of all bits as ptr and values; the host waits for their number, once a slice."""
    bit = torch.arange(8, dtype=torch.uint8, device=words.device)
    places = []
    for number, part in enumerate(words.split(_TOGETHER)):
        bits = (part.view(torch.uint8)[:, None] >> bit) & 1  # little endian, as all machines that run torch
        places.append(bits.flatten().nonzero().squeeze(1) + number * _TOGETHER * BLOCK)
        del bits
    place = torch.cat(places)
    del places
    slot = place // BLOCK
    row = torch.searchsorted(slots.ptr, slot, right=True) - 1
    values = (slot - slots.ptr[row] + slots.first_block[row]) * BLOCK + place % BLOCK
    return torch.searchsorted(slot, slots.ptr), values


def _reach(segments: tuple[Segment, ...]) -> Tensor:
    """Slots of a row of each segment: the key blocks that its last query block may read; int64 ``[S]``."""
    return torch.tensor([0 if s.is_padding else s.end - s.document_begin for s in segments])


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _slots(segments: tuple[Segment, ...], patterns: int, window: WindowSelector, device: torch.device) -> Slots:
    ptr = torch.zeros(len(segments) * patterns + 1, dtype=torch.int64)
    torch.cumsum(_reach(segments).repeat_interleave(patterns), 0, out=ptr[1:])
    first_block = torch.tensor([s.document_begin for s in segments]).repeat_interleave(patterns)
    sinks, words = [], []
    for s, segment in enumerate(segments):
        tokens = global_tokens_read(window, segment).numel()  # the document's first ones
        for offset in range(-(-tokens // BLOCK)):
            bits = (1 << min(BLOCK, tokens - offset * BLOCK)) - 1
            words.append(torch.full((patterns,), bits - (1 << 64) if bits >> 63 else bits))
            sinks.append(ptr[s * patterns : (s + 1) * patterns] + offset)
    empty, count = torch.empty(0, dtype=torch.int64), int(ptr[-1])
    tables = (ptr, first_block, torch.cat([empty, *sinks]), torch.cat([empty, *words]))
    ptr, first_block, sink_slots, sink_words = (x.to(device) for x in tables)
    return Slots(ptr, first_block, sink_slots, sink_words, count)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _local_rows(layout: Layout, rank: int, segments: tuple[Segment, ...], patterns: int, device: torch.device) -> LocalRows:
    block, first, valid = local_blocks(layout, rank, segments, torch.device("cpu"))
    reach, segment = _reach(segments), segment_of_blocks(segments, block)
    slot = (reach.cumsum(0) - reach) * patterns
    tables = (block, first, valid, slot[segment], reach[segment])
    return LocalRows(*(x.to(device) for x in tables))
