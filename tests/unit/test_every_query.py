"""Selection by every query against its definition written as loops, and the Triton kernel against the reference."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from ds_sparse_ring.config import EveryQuerySelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.select import every_query, select_index

from .reference import bound, global_qkv

SCALE = 0.5
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES: list[tuple[list[int], int, int, int]] = [
    ([1], 1, 1, 1024),
    ([64], 2, 1, 64),
    ([700], 4, 2, 192),
    ([300, 70, 520, 3], 4, 1, 256),
    ([1000], 3, 3, 1024),
]


def _inputs(lengths: list[int], heads: int, kv_heads: int, **config: Any) -> tuple[Tensor, Tensor, SequenceContext]:
    _, sequence, context = bound(lengths, **config)
    q, k, _ = global_qkv(sequence, heads, kv_heads, 16)
    return 1.5 * q, k, context


def _chosen(
    q: Tensor, k: Tensor, context: SequenceContext, method: Literal["auto", "triton", "reference"] = "auto"
) -> VerticalSlash:
    index = select_index(q, k, context, scale=SCALE, method=method)
    assert isinstance(index, VerticalSlash)
    return index


def _selector(price: float = 0.08, window: int = 2, sinks: int = 4) -> dict[str, Any]:
    return {"kind": "every_query", "price": price, "window_blocks": window, "sink_tokens": sinks}


def _wanted(q: Tensor, k: Tensor, segment: Segment, selector: EveryQuerySelector) -> set[int]:
    """What queries ``[heads, n, D]`` of a pattern want of keys ``[n, D]``; by loops over rows and blocks."""
    begin = segment.document_begin
    sinks = range(begin * 64, min(begin * 64 + selector.sink_tokens, segment.valid_end))
    out = {j for j in sinks if j < (segment.end - selector.window_blocks) * 64}
    for i in range(segment.begin * 64, segment.valid_end):
        own = i // 64
        for head in q:
            e = (k[: i + 1] @ head[i] * SCALE).exp()
            blocks = {b: e[b * 64 : (b + 1) * 64] for b in range(begin, own + 1)}
            total = float(blocks[begin].max()) + (float(blocks[own].max()) if own > begin else 0.0)
            for b in range(own - 1, begin - 1, -1):
                total += float(blocks[b].max()) if b > begin else 0.0
                if own - b >= selector.window_blocks:
                    out |= {64 * b + j for j, x in enumerate(blocks[b].tolist()) if x >= selector.price * total}
    return out


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "segment_tokens"), SHAPES, ids=str)
def test_columns_are_what_some_query_of_the_segment_wants(
    lengths: list[int], heads: int, kv_heads: int, segment_tokens: int
) -> None:
    group = heads // kv_heads
    for window, per_pattern in ((1, group), (3, 1)):
        q, k, context = _inputs(
            lengths,
            heads,
            kv_heads,
            segment_tokens=segment_tokens,
            heads_per_pattern=per_pattern,
            selector=_selector(0.08, window),
        )
        index, selector = _chosen(q, k, context), context.selector
        assert isinstance(selector, EveryQuerySelector)
        for s, segment in enumerate(context.segments):
            for pattern in range(heads // per_pattern):
                diagonals = index.diagonals(s, pattern).tolist()
                if segment.is_padding:
                    assert diagonals == [0] and not index.columns(s, pattern).numel()
                    continue
                of_heads = slice(pattern * per_pattern, (pattern + 1) * per_pattern)
                wanted = _wanted(q[of_heads], k[pattern * per_pattern // group], segment, selector)
                assert index.columns(s, pattern).tolist() == sorted(wanted)
                assert diagonals == list(range(min(window, segment.end - segment.document_begin)))


def test_every_key_above_the_price_is_kept() -> None:
    """Of softmax itself, whatever the sums of largest values are: also with scores that differ by hundreds."""
    for sharp in (0.1, 1.0, 40.0):
        q, k, context = _inputs([1100], 2, 1, segment_tokens=256, heads_per_pattern=1, selector=_selector(0.02, window=1))
        index = _chosen(sharp * q, k, context)
        n = 1100
        scores = (sharp * q[:, :n] @ k[0, :n].mT * SCALE).masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
        above = (scores.softmax(-1) > 0.02) & (torch.arange(n)[:, None] // 64 > torch.arange(n) // 64)
        for head in range(2):
            for s, segment in enumerate(context.segments):
                rows = above[head, segment.begin * 64 : min(segment.end * 64, n)].any(0).nonzero().flatten()
                assert set(rows.tolist()) <= set(index.columns(s, head).tolist())


def test_a_key_that_one_query_in_the_middle_wants_is_kept_in_its_segment_alone() -> None:
    q, k, context = _inputs([1024], 2, 2, segment_tokens=256, selector=_selector(0.5, sinks=0))
    q[..., 0], k[..., 0] = 0.0, 0.0
    k[1, 77, 0], q[1, 700, 0] = 20.0, 5.0  # nobody else asks in this dimension
    q[..., 1:] *= 0.1
    index = _chosen(q, k, context)
    found = [(s, p, index.columns(s, p).tolist()) for s in range(4) for p in range(2) if index.columns(s, p).numel()]
    assert found == [(2, 1, [77])]


def test_all_heads_of_a_kv_head_share_a_pattern_where_none_are_named() -> None:
    for heads, kv_heads in ((6, 2), (2, 2)):
        q, k, context = _inputs([500], heads, kv_heads, segment_tokens=128, heads_per_pattern=None, selector=_selector())
        _, _, named = _inputs(
            [500], heads, kv_heads, segment_tokens=128, heads_per_pattern=heads // kv_heads, selector=_selector()
        )
        index = _chosen(q, k, context)
        assert index.patterns == kv_heads and index.equal(_chosen(q, k, named))


def test_tokens_that_fill_up_a_document_want_nothing() -> None:
    q, k, context = _inputs([290, 130], 2, 1, segment_tokens=128, selector=_selector())
    expected = _chosen(q, k, context)
    q[:, 290:320], k[:, 290:320] = 1e3, -1e3
    assert _chosen(q, k, context).equal(expected)


def test_scores_that_are_not_finite_are_refused() -> None:
    q, k, context = _inputs([300], 2, 1, selector=_selector())
    q[0, 77, 3] = float("nan")
    with pytest.raises(SparseRingError, match="NaN or infinite"):
        select_index(q, k, context, scale=SCALE)


def test_bits_are_unpacked_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, context = _inputs([1000], 2, 1, segment_tokens=192, selector=_selector())
    expected = _chosen(q, k, context)
    monkeypatch.setattr(every_query, "_TOGETHER", 7)
    assert _chosen(q, k, context).equal(expected)


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "segment_tokens"), SHAPES, ids=str)
def test_the_triton_kernel_marks_the_same(lengths: list[int], heads: int, kv_heads: int, segment_tokens: int) -> None:
    pytest.importorskip("triton")
    group = heads // kv_heads
    for window, per_pattern, size in ((1, group, 16), (3, 1, 24)):
        selector = _selector(0.08, window)
        _, sequence, context = bound(lengths, segment_tokens=segment_tokens, heads_per_pattern=per_pattern, selector=selector)
        q, k, _ = (x.to(DEVICE, torch.float32) for x in global_qkv(sequence, heads, kv_heads, size))
        assert _chosen(1.5 * q, k, context, "triton").equal(_chosen(1.5 * q, k, context, "reference"))  # none is near the price
