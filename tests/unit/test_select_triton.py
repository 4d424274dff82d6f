"""The Triton selection against the reference selectors, under Triton's interpreter where there is no GPU (see conftest.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.config import PriceSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import fast, fast_mass, fast_probe, select_index
from ds_sparse_ring.select.mass import _token_diagonal_mass
from ds_sparse_ring.select.price import _block_diagonal_mass, _take_out_forced
from ds_sparse_ring.select.probe import pattern_mean, probe_groups, row_probabilities, target_segment
from tests.common import DistributedTest, rank_device

from .reference import NoWaiting, bound, global_qkv

triton = pytest.importorskip("triton")

SCALE = 0.25
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRICE = {"kind": "price", "price": 2e-3}
TOP_P = {"kind": "top_p", "p": 0.6, "min_columns": 3, "max_slashes": 40}
FIXED = {"kind": "fixed", "columns": 17, "slashes": 5}


def _planted(
    sequence: Sequence, heads: int, kv_heads: int, head_size: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Queries and keys with strong columns and a slash, so that there is something to find."""
    q, k, _ = global_qkv(sequence, heads, kv_heads, head_size)
    q *= 4 / head_size**0.5
    k[:, 37::211] += 2 * q.mean(1)[:kv_heads, None] + 1
    k[:, 100:] += 0.7 * q[:kv_heads, :-100] if k.shape[1] > 100 else 0
    return (q + 0.5).to(DEVICE, dtype), k.to(DEVICE, dtype)


def _eighths(x: Tensor) -> Tensor:
    """Of so few bits that scores are exact: equal keys score the same in every order of summation, and processors have theirs."""
    return (8 * x).round() / 8


def _both(q: Tensor, k: Tensor, context: SequenceContext) -> tuple[VerticalSlash, VerticalSlash]:
    expected = select_index(q, k, context, scale=SCALE, method="reference")
    got = select_index(q, k, context, scale=SCALE, method="triton")
    assert isinstance(expected, VerticalSlash) and isinstance(got, VerticalSlash)
    return expected, got


def _check(q: Tensor, k: Tensor, context: SequenceContext) -> VerticalSlash:
    """Both select the same, but for entries whose mass is within 1e-3 of the price."""
    expected, got = _both(q, k, context)
    assert got.segments == expected.segments and got.heads_per_pattern == expected.heads_per_pattern
    for ptr, values in ((got.diagonal_ptr, got.diagonal_values), (got.column_ptr, got.column_values)):
        assert ptr.dtype == values.dtype == torch.int64 and int(ptr[-1]) == values.numel()
    if got.equal(expected):
        return got
    assert isinstance(context.selector, PriceSelector), "masses of random inputs are far apart: other selectors must agree"
    price, patterns = context.selector.price, q.shape[0] // context.heads_per_pattern
    for probe in row_probabilities(q, k, probe_groups(context.segments, context.config), context, SCALE):
        s = target_segment(context.segments, probe.segment, context.config)
        if s is None:
            continue
        left = pattern_mean(probe.p, context.heads_per_pattern)
        _take_out_forced(left, probe, context)
        mass = left.mean(1)
        left.masked_fill_((mass > price)[:, None], 0)
        diagonal = _block_diagonal_mass(left, probe, context.segments[s].end - context.segments[s].document_begin)
        first = context.segments[s].document_begin * BLOCK
        for p in range(patterns):
            for token in set(got.columns(s, p).tolist()) ^ set(expected.columns(s, p).tolist()):
                assert abs(float(mass.flatten(1)[p, token - first]) / price - 1) < 1e-3
            for offset in set(got.diagonals(s, p).tolist()) ^ set(expected.diagonals(s, p).tolist()):
                assert abs(float(diagonal[p, offset]) / (BLOCK * price) - 1) < 1e-3
    return got


@pytest.mark.parametrize("probe", ["own", "previous"])
@pytest.mark.parametrize("selector", [PRICE, TOP_P, FIXED], ids=lambda s: s["kind"])
def test_documents_and_segments_select_as_the_reference(selector: dict[str, Any], probe: str) -> None:
    _, sequence, context = bound([230, 1, 130], segment_tokens=128, probe=probe, probe_tokens=50, selector=selector)
    index = _check(*_planted(sequence, 2, 1), context)
    if probe == "own":
        assert index.columns(1, 0).numel() > 5, "there must be something to find beside the sinks"


def test_a_dtype_without_tensor_cores_is_refused() -> None:
    _, sequence, context = bound([64])
    q, k = _planted(sequence, 2, 1, dtype=torch.float64)
    with pytest.raises(SparseRingError, match=r"float64.*reference"):
        select_index(q, k, context, scale=SCALE, method="triton")
    assert isinstance(select_index(q, k, context, scale=SCALE), VerticalSlash)


@pytest.mark.parametrize("length", [1, 64, 65, 127, 700])
def test_any_length_selects_as_the_reference(length: int) -> None:
    _, sequence, context = bound([length], segment_tokens=None, selector=PRICE)
    _check(*_planted(sequence, 2, 1), context)


@pytest.mark.parametrize("heads_per_pattern", [1, 4])
@pytest.mark.parametrize(
    ("head_size", "dtype"),
    [
        (96, torch.float16),
        (64, torch.float32),
        # the interpreter multiplies bfloat16 wrongly
        pytest.param(128, torch.bfloat16, marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")),
        pytest.param(256, torch.bfloat16, marks=pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")),
    ],
    ids=["96", "64", "128", "256"],
)
def test_grouped_heads_and_any_head_size(heads_per_pattern: int, head_size: int, dtype: torch.dtype) -> None:
    _, sequence, context = bound([330], segment_tokens=192, heads_per_pattern=heads_per_pattern, selector=PRICE)
    _check(*_planted(sequence, 16, 2, head_size, dtype), context)


@pytest.mark.parametrize(("probe", "heads_per_pattern"), [("own", 1), ("previous", 4)])
@pytest.mark.slow(probe=["own"])
def test_blocks_of_too_little_mass_are_left_out_without_a_trace(
    probe: str, heads_per_pattern: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"segment_tokens": 192, "heads_per_pattern": heads_per_pattern, "probe": probe}
    _, sequence, context = bound([777, 130], selector={"kind": "price", "price": 0.02}, **config)
    q, k = _planted(sequence, 4, 1)
    q[..., 0], k[..., 0] = 8, -4  # three blocks of four score e**8 times less
    k.unflatten(1, (-1, 64))[:, ::4, :, 0] = 0
    whole = _check(q, k, context)
    assert whole.columns(3, 0).numel() > 4, "more than the sinks"
    monkeypatch.setattr(fast, "_BOUNDED_BLOCKS", 0)
    needed, find = [], fast._needed

    def kept(*args):
        needed.append(find(*args))
        return needed[-1]

    monkeypatch.setattr(fast, "_needed", kept)
    skipping = select_index(q, k, context, scale=SCALE, method="triton")
    assert isinstance(skipping, VerticalSlash) and skipping.equal(whole)
    assert 0.1 < float(needed[0].float().mean()) < 0.9


def test_keys_may_be_a_view_of_another_layout() -> None:
    _, sequence, context = bound([200], selector=PRICE)
    q, k = _planted(sequence, 4, 2)
    expected = select_index(q, k, context, scale=SCALE, method="triton")
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k)]
    views[1] = views[1].mT.contiguous().mT
    got = select_index(views[0], views[1], context, scale=SCALE, method="triton")
    assert isinstance(expected, VerticalSlash) and isinstance(got, VerticalSlash) and got.equal(expected)


def test_local_blocks_and_sinks_are_taken_out_first_and_always_there() -> None:
    config = {"segment_tokens": 64, "local_blocks": 3, "sink_tokens": 70, "selector": {"kind": "price", "price": 1e-3}}
    for probe in ("own", "previous"):
        _, sequence, context = bound([300, 90], probe=probe, **config)
        _check(*_planted(sequence, 2, 1), context)


@pytest.mark.parametrize("selector", [PRICE, {**TOP_P, "max_columns": 9, "max_slashes": 3}, FIXED], ids=lambda s: s["kind"])
def test_ties_go_to_the_lowest_index(selector: dict[str, Any]) -> None:
    _, sequence, context = bound([400], segment_tokens=None, sink_tokens=0, selector=selector)
    q, k = _planted(sequence, 2, 1)
    expected, got = _both(_eighths(q), torch.ones_like(k), context)
    assert got.equal(expected)
    if selector["kind"] == "fixed":
        assert got.columns(0, 0).tolist() == list(range(17))


def _hostile(kind: str, sequence: Sequence, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys of one KV head with many equal scores, or with one that takes all."""
    q, k = (_eighths(x) for x in _planted(sequence, heads, 1))
    if kind == "constant":
        k = torch.ones_like(k)
    elif kind == "repeated":  # every token diagonal and every column has equals, in all blocks
        k = k[:, torch.arange(k.shape[1]) % 48 // 3]
    elif kind == "huge":
        q, k = q.abs(), k.clone()
        k[:, 70] = 1e4
    return q, k


@pytest.mark.slow(kind=["repeated"])
@pytest.mark.parametrize("kind", ["constant", "repeated", "huge"])
@pytest.mark.parametrize(
    "config",
    [
        {"lengths": [260], "segment_tokens": 128, "probe_tokens": 50},
        {"lengths": [230, 1, 130], "segment_tokens": 128, "probe": "previous", "probe_tokens": 37, "heads_per_pattern": 2},
        {"lengths": [90, 20], "segment_tokens": None, "heads_per_pattern": 4},
    ],
    ids=["unequal segments", "documents", "short"],
)
def test_selection_by_mass_finds_the_same_among_equals(kind: str, config: dict[str, Any]) -> None:
    lengths = config["lengths"]
    rest = {name: value for name, value in config.items() if name != "lengths"} | {"sink_tokens": 0, "local_blocks": 1}
    for selector in (
        {**FIXED, "columns": 100, "slashes": 70},
        {"kind": "top_p", "p": 0.37, "max_columns": 90, "max_slashes": 70},
    ):
        _, sequence, context = bound(lengths, selector=selector, **rest)
        index = _check(*_hostile(kind, sequence, rest.get("heads_per_pattern", 2)), context)
        if kind == "constant" and selector["kind"] == "fixed" and lengths == [260]:
            assert index.columns(2, 1).tolist() == list(range(100)) and index.diagonals(2, 1).tolist() == [0, 1, 2]


def test_every_token_diagonal_has_the_mass_of_the_reference() -> None:
    _, sequence, context = bound([260], segment_tokens=None, probe_tokens=50, heads_per_pattern=2, selector=FIXED)
    q, k = _planted(sequence, 4, 1)
    (probe,) = row_probabilities(q, k, probe_groups(context.segments, context.config), context, SCALE)
    expected = _token_diagonal_mass(pattern_mean(probe.p, 2).double(), probe, context)
    _, mass = fast_mass._masses(fast_probe.make_probe(q, k, context, SCALE, False)[0], 0, 1)
    torch.testing.assert_close(mass.view(2, -1).double() * 64 / 50, expected, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("p", [0.05, 1.0])
def test_top_p_reaches_p_with_the_fewest_columns(p: float) -> None:
    selector = {"kind": "top_p", "p": p, "max_slashes": 0}
    _, sequence, context = bound([200], segment_tokens=None, sink_tokens=0, local_blocks=1, selector=selector)
    q, k = _planted(sequence, 2, 1)
    index = select_index(q, k, context, scale=SCALE, method="triton")
    (probe,) = row_probabilities(q.double(), k.double(), probe_groups(context.segments, context.config), context, SCALE)
    mass = probe.p.mean(1).flatten(1)
    for pattern in range(2):
        kept = mass[pattern, index.columns(0, pattern)]
        assert float(kept.sum()) >= p * (1 - 1e-6) and float(kept.sum() - kept.min()) < p


def test_budgets_beyond_what_there_is_keep_everything() -> None:
    for selector in ({"kind": "fixed", "columns": 500, "slashes": 500}, {"kind": "fixed", "columns": 0, "slashes": 0}):
        _, sequence, context = bound([100], segment_tokens=None, selector=selector)
        _check(*_planted(sequence, 2, 1), context)


@pytest.mark.slow
def test_masses_are_held_for_a_few_groups_and_patterns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sequence, context = bound([64, 90], segment_tokens=64, selector=TOP_P)
    q, k = _planted(sequence, 3, 1)
    whole = select_index(q, k, context, scale=SCALE, method="triton")
    monkeypatch.setattr(fast_mass, "_ENTRIES", 2 * 64 * 64)  # two patterns of a group of one block
    parts = select_index(q, k, context, scale=SCALE, method="triton")
    assert isinstance(whole, VerticalSlash) and isinstance(parts, VerticalSlash) and parts.equal(whole)


@pytest.mark.parametrize("selector", [PRICE, TOP_P], ids=lambda s: s["kind"])
def test_more_columns_than_there_is_room_for_are_all_in_the_index(
    selector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sequence, context = bound([230, 90], segment_tokens=128, selector=selector)
    q, k = _planted(sequence, 2, 1)
    monkeypatch.setattr(fast, "_KEPT", 0)
    whole = select_index(q, k, context, scale=SCALE, method="triton")
    assert isinstance(whole, VerticalSlash)
    for values in (whole.diagonal_values, whole.column_values):
        assert values.untyped_storage().nbytes() == values.numel() * 8, "an index must not keep larger buffers alive"
    rooms, fill = [], fast._filled

    def counted(probe, words, before, room):
        filled = fill(probe, words, before, room)
        rooms.append(room)
        if room == 7:  # beyond the room nothing is written: the first ones are, and they are right
            assert torch.equal(filled, whole.column_values[:7])
        return filled

    monkeypatch.setattr(fast, "_ROOM", 7)
    monkeypatch.setattr(fast, "_filled", counted)
    index = select_index(q, k, context, scale=SCALE, method="triton")
    assert isinstance(index, VerticalSlash) and index.equal(whole)
    assert rooms == [7, whole.column_values.numel()]


@pytest.mark.parametrize("bounded_blocks", [0, 1024])
def test_one_huge_key_is_the_column(bounded_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_BOUNDED_BLOCKS", bounded_blocks)  # 0: sums relative to the other blocks overflow
    _, sequence, context = bound([300], segment_tokens=None, sink_tokens=0)
    q, k, _ = global_qkv(sequence, 1, 1, 16, dtype=torch.float32)
    k[:, 70] = 1e4
    index = _check(q.abs().to(DEVICE), k.to(DEVICE), context)
    assert index.columns(0, 0).tolist() == [70] and index.diagonals(0, 0).tolist() == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused_and_padding_may_hold_anything(bad: float) -> None:
    for selector in (PRICE, FIXED):
        _, sequence, context = bound([150], selector=selector)
        q, k = _planted(sequence, 2, 1)
        k[0, 10] = bad
        with pytest.raises(SparseRingError, match="NaN or infinite"):
            select_index(q, k, context, scale=SCALE, method="triton")
        k[0, 10], k[0, 150:] = 0, bad
        _check(q, k, context)


@pytest.mark.parametrize("selector", [PRICE, TOP_P, FIXED], ids=lambda s: s["kind"])
@pytest.mark.slow(selector=[TOP_P])
def test_the_host_waits_once_per_layer(selector: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, sequence, context = bound([130], segment_tokens=64, selector=selector)
    q, k = _planted(sequence, 2, 1)
    select_index(q, k, context, scale=SCALE, method="triton")  # makes the tables
    waits: list[int] = []
    tolist, fill = torch.Tensor.tolist, fast._filled

    def early(*args):
        assert not waits, "what is launched behind the wait leaves the device idle"
        return fill(*args)

    def counted(self):
        waits.append(self.numel() * self.element_size())
        return tolist(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    monkeypatch.setattr(fast, "_filled", early)
    with NoWaiting():
        select_index(q, k, context, scale=SCALE, method="triton")
    assert len(waits) == 1 and waits[0] <= 4096


def test_every_run_gives_the_same_bits() -> None:
    _, sequence, context = bound([400], segment_tokens=128, heads_per_pattern=2, selector={"kind": "price", "price": 1e-4})
    q, k = _planted(sequence, 4, 2, dtype=torch.float16)
    first, second = (select_index(q, k, context, scale=SCALE, method="triton") for _ in range(2))
    assert isinstance(first, VerticalSlash) and isinstance(second, VerticalSlash) and first.equal(second)


@pytest.mark.skipif(
    torch.cuda.device_count() == 1 and Version(triton.__version__) < Version("3.9"),
    reason="one GPU cannot hold two ranks, and the interpreter of this Triton needs an older NumPy",
)
class TestRingSelection(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("bounded_blocks", [0, 1024])
    @pytest.mark.slow(bounded_blocks=[1024])
    def test_every_rank_makes_the_same_index(self, bounded_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast, "_BOUNDED_BLOCKS", bounded_blocks)
        cases: list[dict[str, Any]] = [
            {"selector": PRICE, "segment_tokens": 128},
            {"selector": PRICE, "layout": "zigzag", "probe": "previous", "segment_tokens": 64},
            {"selector": TOP_P, "segment_tokens": None},
            {"selector": FIXED, "layout": "zigzag", "segment_tokens": 128, "probe": "previous", "heads_per_pattern": 2},
            {"selector": {**TOP_P, "max_columns": 50}, "segment_tokens": 128, "probe_tokens": 37, "sink_tokens": 0},
        ]
        for config in cases if bounded_blocks else cases[:2]:
            _, sequence, context = bound([70, 250], **config)
            q, k = _planted(sequence, 2, 1) if config["selector"] in (PRICE, TOP_P) else _hostile("constant", sequence, 2)
            mine = [sequence.layout.shard(x.to(rank_device()), sequence.rank, 1) for x in (q, k)]
            expected, got = _both(mine[0], mine[1], context)
            assert got.equal(expected)
            with NoWaiting():  # but for the summaries of all ranks: their lists of columns follow at once
                select_index(mine[0], mine[1], context, scale=SCALE, method="triton")
            for name in ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values"):
                value = getattr(got, name)
                assert all(torch.equal(other, value) for other in context.axes.ring_gather(value))
