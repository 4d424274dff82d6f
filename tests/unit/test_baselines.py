"""Selectors that serve as baselines, against their definitions written as loops over tokens and blocks; on rings, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import BlockLists, Index, VerticalSlash, column_density, density
from ds_sparse_ring.integrations.deepspeed import Setup
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from tests.common import DistributedTest

from .reference import NoWaiting, bound, dense_mask, global_qkv, packed_batch
from .test_ring import _check_against_dense, _shard

SCALE = 0.25
KINDS: list[dict[str, Any]] = [
    {"kind": "window", "window_blocks": 2, "sink_tokens": 3},
    {"kind": "longformer", "window_blocks": 1, "global_tokens": 5, "global_every": 100},
    {"kind": "bigbird", "window_blocks": 2, "sink_blocks": 1, "random_blocks": 2},
    {"kind": "random_diagonals", "density": 0.5, "window_blocks": 1, "sink_tokens": 2},
    {"kind": "moba", "top_k": 2, "block_tokens": 128},
    {"kind": "xattention", "threshold": 0.6, "stride": 8},
    {"kind": "norm", "columns": 40, "window_blocks": 1, "sink_tokens": 3},
    {"kind": "every_query", "price": 0.3, "window_blocks": 1, "sink_tokens": 3},
]
STATIC, CHOSEN, NORM = KINDS[:4], KINDS[4:6], KINDS[6]
LENGTHS = [300, 70, 520]  # 5, 2 and 9 blocks


def _select(q: torch.Tensor, k: torch.Tensor, context: SequenceContext) -> Index:
    return select_index(q, k, context, scale=SCALE)


def _documents(lengths: list[int], tokens: int) -> list[tuple[int, int]]:
    """First token of each token's document in the aligned stream, and one past its last valid one; padding has its block."""
    places: list[tuple[int, int]] = []
    for length in lengths:
        begin = len(places)
        places += [(begin, begin + length)] * (-(-length // 64) * 64)
    return places + [(i // 64 * 64, i // 64 * 64) for i in range(len(places), tokens)]


def _mask_of(lengths: list[int], tokens: int, reads: Any) -> torch.Tensor:
    """``reads(i, j, begin)`` for all j <= i of a document of valid keys, and every block its own."""
    out = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i, (begin, end) in enumerate(_documents(lengths, tokens)):
        for j in range(begin, i + 1):
            out[i, j] = i // 64 == j // 64 or bool(reads(i, j, begin, end))
    return out


@pytest.mark.parametrize("segment_tokens", [None, 128])
def test_windows_and_global_tokens_are_what_they_say(segment_tokens: int | None) -> None:
    lengths = [3, 230]
    for selector in KINDS[:2]:
        _, sequence, context = bound(lengths, selector=selector, segment_tokens=segment_tokens)
        q, k, _ = global_qkv(sequence, 2, 1, 8)

        def reads(i: int, j: int, begin: int, end: int, selector: dict[str, Any] = selector) -> bool:
            place = j - begin
            first = place < selector["sink_tokens" if "sink_tokens" in selector else "global_tokens"]
            every = "global_every" in selector and place % selector["global_every"] == 0 and place > 0
            return i // 64 - j // 64 < selector["window_blocks"] or (j < end and (first or every))

        expected = _mask_of(lengths, q.shape[1], reads)
        assert (dense_mask(_select(q, k, context), 2, q.shape[1]) == expected).all()


def test_a_window_is_one_object_for_all_layers() -> None:
    _, sequence, context = bound([300], selector=KINDS[0])
    q, k, _ = global_qkv(sequence, 2, 1, 8)
    assert _select(q, k, context) is _select(2 * q, k, context.at_layer(3))


def _rows(index: Index) -> list[list[int]]:
    assert isinstance(index, BlockLists)
    bounds = index.block_ptr.tolist()
    return [index.block_values[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


def test_bigbird_reads_window_first_blocks_and_distinct_random_ones_between() -> None:
    lengths = [64 * 20, 70, 64 * 9]
    _, sequence, context = bound(lengths, selector={**KINDS[2], "random_blocks": 3})
    q, k, _ = global_qkv(sequence, 4, 2, 8)
    index = _select(q, k, context)
    assert isinstance(index, BlockLists)
    documents = _documents(lengths, q.shape[1])
    rows = _rows(index)
    for row, read in enumerate(rows):
        query = row % sequence.layout.blocks
        first = documents[query * 64][0] // 64
        assert read == sorted(set(read)) and first <= read[0] and read[-1] == query
        forced = {first, max(first, query - 1), query}
        between = len(range(first + 1, query - 1))
        assert forced <= set(read) and len(read) == len(forced) + min(between, 3)
    assert rows == _rows(_select(-q, k, context)), "the same in all steps"
    blocks = sequence.layout.blocks
    assert rows[:blocks] != rows[blocks : 2 * blocks], "patterns differ"
    assert rows != _rows(_select(q, k, context.at_layer(1))), "layers differ"


def test_random_blocks_are_each_as_likely_as_any_other() -> None:
    _, sequence, context = bound(
        [64 * 12], selector={"kind": "bigbird", "window_blocks": 1, "sink_blocks": 0, "random_blocks": 3}
    )
    q, k, _ = global_qkv(sequence, 4, 4, 8)
    counts = torch.zeros(11)
    for layer in range(200):
        index = _select(q, k, context.at_layer(layer))
        for pattern in range(4):
            counts[_rows(index)[12 * pattern + 11][:-1]] += 1
    share = counts / 800
    assert (share - 3 / 11).abs().max() < 5 * (3 / 11 * 8 / 11 / 800) ** 0.5


@pytest.mark.parametrize("wanted", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("segment_tokens", [None, 1024])
def test_random_diagonals_have_the_density_that_was_asked_for(wanted: float, segment_tokens: int | None) -> None:
    selector = {"kind": "random_diagonals", "density": wanted, "window_blocks": 1, "sink_tokens": 2}
    _, sequence, context = bound([64 * 150, 64 * 41], selector=selector, segment_tokens=segment_tokens)
    q, k = torch.zeros(2, 8, 64 * 191, 8)
    index = _select(q, k, context)
    assert isinstance(index, VerticalSlash)
    share = density(index) - column_density(index)
    torch.testing.assert_close(share.mean(), torch.tensor(wanted, dtype=torch.float64), rtol=0.05, atol=0)
    assert all(0 in index.diagonals(s, p) for s in range(len(sequence.segments)) for p in range(8))
    if wanted < 1:
        last = len(sequence.segments) - 1  # the first one may have a single diagonal
        assert index.diagonals(last, 0).tolist() != index.diagonals(last, 1).tolist()
        other = _select(q, k, context.at_layer(1))
        assert isinstance(other, VerticalSlash) and not index.equal(other)
    again = _select(q + 1, k, context)
    assert isinstance(again, VerticalSlash) and index.equal(again)


def _moba(q: torch.Tensor, k: torch.Tensor, lengths: list[int], group: int, top_k: int, size: int) -> list[list[int]]:
    """Rows of block lists by the definition."""
    documents, rows = _documents(lengths, q.shape[1]), []
    per_kv = q.shape[0] // k.shape[0]
    for pattern in range(q.shape[0] // group):
        for block in range(q.shape[1] // 64):
            begin, end = documents[block * 64]
            own = begin + (block * 64 - begin) // size * size
            scores = []
            for chunk in range(begin, own, size):
                heads = range(pattern * group, (pattern + 1) * group)
                mine = [
                    q[h, block * 64 : min(end, block * 64 + 64)].mean(0) @ k[h // per_kv, chunk : chunk + size].mean(0)
                    for h in heads
                ]
                scores.append((-float(sum(mine)), chunk))
            chosen = sorted(chunk for _, chunk in sorted(scores)[: top_k - 1])
            blocks = [c // 64 + b for c in chosen for b in range(size // 64)]
            rows.append(blocks + list(range(own // 64, block + 1)))
    return rows


@pytest.mark.parametrize(("top_k", "block_tokens"), [(1, 64), (2, 64), (3, 128), (2, 256)])
def test_moba_reads_the_blocks_of_best_mean_key_and_its_own(top_k: int, block_tokens: int) -> None:
    selector = {"kind": "moba", "top_k": top_k, "block_tokens": block_tokens}
    _, sequence, context = bound(LENGTHS, selector=selector, heads_per_pattern=2)
    q, k, _ = global_qkv(sequence, 4, 2, 8)
    index = _select(q, k, context)
    assert _rows(index) == _moba(q.cpu(), k.cpu(), LENGTHS, 2, top_k, block_tokens)


def _xattention(
    q: torch.Tensor, k: torch.Tensor, lengths: list[int], group: int, threshold: float, stride: int
) -> list[list[int]]:
    documents, rows, per_kv = _documents(lengths, q.shape[1]), [], q.shape[0] // k.shape[0]
    token = torch.arange(64)
    diagonal = (token[:, None] + token) % stride == 0
    for pattern in range(q.shape[0] // group):
        for block in range(q.shape[1] // 64):
            begin, end = documents[block * 64]
            earlier = list(range(begin // 64, block + 1))
            mass = torch.zeros(len(earlier), dtype=torch.float64)
            for h in range(pattern * group, (pattern + 1) * group):
                scores = []
                for key in earlier:
                    whole = q[h, block * 64 : block * 64 + 64] @ k[h // per_kv, key * 64 : key * 64 + 64].T * SCALE
                    on = diagonal & (block * 64 + token < end)[:, None]
                    if key == block:
                        on = on & (token[:, None] >= token)
                    scores.append(whole[on].mean() if on.any() else whole.new_zeros(()))
                mass += torch.stack(scores).softmax(0) / group
            kept, total = {block}, 0.0
            for at in mass.argsort(descending=True, stable=True).tolist():
                if total >= threshold * float(mass.sum()):
                    break
                kept.add(earlier[at])
                total += float(mass[at])
            rows.append(sorted(kept))
    return rows


@pytest.mark.parametrize(("threshold", "stride"), [(0.5, 1), (0.8, 8), (0.6, 64)])
def test_xattention_reads_the_fewest_blocks_that_reach_the_threshold(
    threshold: float, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_sparse_ring.select import xattention

    monkeypatch.setattr(xattention, "_ENTRIES", 300)  # a few query blocks at a time
    selector = {"kind": "xattention", "threshold": threshold, "stride": stride}
    _, sequence, context = bound(LENGTHS, selector=selector, heads_per_pattern=2)
    q, k, _ = global_qkv(sequence, 4, 2, 8)
    index = _select(3 * q, k, context)
    assert _rows(index) == _xattention(3 * q.cpu(), k.cpu(), LENGTHS, 2, threshold, stride)
    assert 0.05 < density(index).mean() < 0.95


@pytest.mark.parametrize(
    ("columns", "order", "window"), [(40, "largest", 1), (25, "smallest", 2), (1000, "largest", 1), (0, "largest", 3)]
)
def test_norms_read_the_keys_of_most_norm_and_first_tokens(columns: int, order: str, window: int) -> None:
    lengths = [300, 70]
    selector = {**NORM, "columns": columns, "order": order, "window_blocks": window}
    _, sequence, context = bound(lengths, selector=selector, segment_tokens=128, heads_per_pattern=2)
    q, k, _ = global_qkv(sequence, 8, 2, 8)
    k[:, 10] = k[:, 9]  # equal norms: the earlier token
    index = _select(q, k, context)
    assert isinstance(index, VerticalSlash)
    norms, sign = k.norm(dim=2), -1 if order == "largest" else 1
    for s, segment in enumerate(sequence.segments):
        begin = segment.document_begin * 64
        readable = range(begin, max(begin, min(segment.valid_end, (segment.end - window) * 64)))
        for pattern in range(4):
            free = sorted((sign * float(norms[pattern // 2, j]), j) for j in readable[3:])
            assert index.columns(s, pattern).tolist() == sorted([*readable[:3], *(j for _, j in free[:columns])])
            reach = 1 if segment.is_padding else segment.end - segment.document_begin
            assert index.diagonals(s, pattern).tolist() == list(range(min(window, reach)))


def test_norms_that_are_not_finite_are_refused() -> None:
    _, sequence, context = bound([300], selector=NORM)
    q, k, _ = global_qkv(sequence, 2, 1, 8)
    k[0, 77, 3] = float("inf")
    with pytest.raises(SparseRingError, match="NaN or infinite"):
        _select(q, k, context)


def test_equal_scores_go_to_the_earliest_block() -> None:
    for selector, row in (({**KINDS[4], "block_tokens": 64}, [0, 7]), ({**KINDS[5], "threshold": 0.5}, [0, 1, 2, 3, 7])):
        _, sequence, context = bound([512], selector=selector)
        q, k, _ = global_qkv(sequence, 1, 1, 8)
        index = _select(torch.ones_like(q), torch.ones_like(k), context)
        assert _rows(index)[7] == row


@pytest.mark.parametrize("selector", CHOSEN)
def test_tokens_that_fill_up_a_document_choose_nothing(selector: dict[str, Any]) -> None:
    _, sequence, context = bound([290, 130], selector=selector)
    q, k, _ = global_qkv(sequence, 2, 1, 8)
    expected = _rows(_select(q, k, context))
    q[:, 290:320], k[:, 290:320] = 1e3, -1e3
    assert _rows(_select(q, k, context)) == expected


@pytest.mark.parametrize("selector", CHOSEN)
def test_scores_that_are_not_finite_are_refused(selector: dict[str, Any]) -> None:
    _, sequence, context = bound([300], selector=selector)
    for broken in range(2):
        tensors = global_qkv(sequence, 2, 1, 8)[:2]
        tensors[broken][0, 77, 3] = float("nan")
        with pytest.raises(SparseRingError, match="NaN or infinite"):
            _select(*tensors, context)


@pytest.mark.parametrize("selector", STATIC)
def test_patterns_without_a_choice_never_wait_for_the_device(selector: dict[str, Any]) -> None:
    _, sequence, context = bound(LENGTHS, selector=selector)
    q, k, _ = global_qkv(sequence, 2, 1, 8)
    expected = dense_mask(_select(q, k, context), 2, q.shape[1])  # makes the tables
    with NoWaiting():
        index = _select(q, k, context)
    assert (dense_mask(index, 2, q.shape[1]) == expected).all()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"selector": {"kind": "window", "window_blocks": 0}}, r"selector.window_blocks = 0.*greater than or equal to 1.*64 tokens"),
    ({"selector": {"kind": "window", "sink_tokens": -1}}, "selector.sink_tokens = -1"),
    ({"selector": {"kind": "longformer", "global_every": 0}}, "selector.global_every = 0"),
    ({"selector": {"kind": "bigbird", "random_blocks": -1}}, "selector.random_blocks = -1"),
    ({"selector": {"kind": "bigbird", "seed": -1}}, "selector.seed = -1"),
    ({"selector": {"kind": "random_diagonals", "density": 0}}, "selector.density = 0.*greater than 0"),
    ({"selector": {"kind": "random_diagonals", "density": 5}}, "selector.density = 5.*less than or equal to 1"),
    ({"selector": {"kind": "moba", "top_k": 0}}, "selector.top_k = 0"),
    ({"selector": {"kind": "moba", "block_tokens": 100}}, "block_tokens = 100 is not a multiple of 64: use 64 or 128"),
    ({"selector": {"kind": "xattention", "stride": 3}}, "selector.stride = 3.*1, 2, 4, 8, 16, 32 or 64"),
    ({"selector": {"kind": "xattention", "threshold": 90}}, "selector.threshold = 90"),
    ({"selector": {"kind": "norm", "columns": -1}}, "selector.columns = -1"),
    ({"selector": {"kind": "every_query", "price": 0}}, "selector.price = 0.*greater than 0"),
    ({"selector": {"kind": "every_query"}, "probe": "previous"}, 'probe = "previous" has no effect on selector "every_query"'),
    ({"selector": {"kind": "norm"}, "probe": "previous"}, 'probe = "previous" has no effect on selector "norm"'),
    ({"selector": {"kind": "window"}, "local_blocks": 4}, 'local_blocks = 4 has no effect on selector "window".*window_blocks'),
    ({"selector": {"kind": "moba"}, "sink_tokens": 0}, 'sink_tokens = 0 has no effect on selector "moba".*leave it out'),
    ({"selector": {"kind": "xattention"}, "probe": "previous"}, 'probe = "previous" has no effect.*use probe = "own"'),
]


@pytest.mark.parametrize(("section", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_values_are_refused_with_their_meaning(section: dict[str, Any], message: str) -> None:
    with pytest.raises(SparseRingError, match=message):
        SparseRingConfig.from_deepspeed({"sparse_ring": section})


def test_a_dumped_configuration_is_read_again() -> None:
    for selector in KINDS:
        config = SparseRingConfig(selector=selector)
        assert SparseRingConfig(**config.model_dump()) == config


def test_the_set_up_names_no_probe_and_no_forced_entries_of_selectors_that_say_all() -> None:
    for selector, forced in ((KINDS[0], False), ({"kind": "price"}, True)):
        ring = SparseRing(SparseRingConfig(selector=selector))
        rows = Setup(ring, zero_stage=0, micro_batch=1, accumulation=1, dtype="float32", gradient_checkpointing=False).rows()
        assert ("always active" in dict(rows)) == forced == ("probed by" in dict(rows)["segments"])
    full = Setup(SparseRing(SparseRingConfig(selector={"kind": "full"})), 0, 1, 1, "float32", gradient_checkpointing=False)
    assert not {"segments", "always active"} & set(dict(full.rows())), "it needs none"


@pytest.mark.parametrize("selector", KINDS, ids=[selector["kind"] for selector in KINDS])
def test_a_training_step_lowers_the_loss(selector: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []

    def spy(q: torch.Tensor, k: torch.Tensor, context: SequenceContext, **options: Any) -> Index:
        layers.append(context.layer)
        return select_index(q, k, context, **options)

    monkeypatch.setattr("ds_sparse_ring.attention.select_index", spy)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes))
    ring = SparseRing(SparseRingConfig(selector=selector, segment_tokens=128, true_recall_rows=8))
    attach(model, ring)
    ring.meter.active = True
    batch = ring.sequence_batch(packed_batch([600, 100]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]
    assert layers == [0, 1, 0, 1]
    assert 0 < ring.meter.pop()["density"] < 1


class TestBaselinesOnRings(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.slow(world_size=[4])
    def test_outputs_and_gradients_equal_dense_masked_attention(self) -> None:
        plans: list[tuple[dict[str, Any], list[dict[str, Any]]]]
        plans = [({"ulysses_degree": 2}, [KINDS[2], *CHOSEN]), ({"ulysses_degree": 2, "heads_per_pattern": None}, KINDS[-1:])]
        if dist.get_world_size() == 2:
            plans = [({}, KINDS), ({"layout": "zigzag"}, KINDS[2:3]), ({"layout": "contiguous"}, CHOSEN[:1])]
            _check_against_dense([200, 90], 4, 1, selector=CHOSEN[0], heads_per_pattern=2)
            _check_against_dense([200], 4, 1, selector={"kind": "moba", "top_k": 1, "block_tokens": 64})
        for plan, selectors in plans:
            for selector in selectors:
                _check_against_dense([150, 70], 4, 2, segment_tokens=128, selector=selector, **plan)

    def test_every_rank_holds_the_index_of_one_process(self) -> None:
        for layout in ("striped", "zigzag", "contiguous"):
            _, sequence, of_ring = bound(LENGTHS, layout=layout)
            _, alone, of_one = bound(LENGTHS, layout=layout, degree=1)
            assert sequence.segments == alone.segments
            q, k, _ = global_qkv(sequence, 4, 2, 8, dtype=torch.float32)
            for selector in KINDS:
                chosen = SparseRingConfig(selector=selector).selector
                whole = _select(q, k, replace(of_one, selector=chosen))
                mine = _select(_shard(q, sequence)[0], _shard(k, sequence)[0], replace(of_ring, selector=chosen))
                for name in ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values", "block_ptr", "block_values"):
                    assert hasattr(mine, name) == hasattr(whole, name)
                    assert not hasattr(mine, name) or torch.equal(getattr(mine, name), getattr(whole, name)), (layout, selector)
                if layout == "striped" and dist.get_world_size() == 2 and isinstance(mine, BlockLists):
                    rows = _rows(mine)  # no pair twice
                    assert all(row == sorted(set(row)) for row in rows)

    @pytest.mark.world_size(2)
    def test_a_rank_with_broken_queries_stops_all(self) -> None:
        for selector in CHOSEN:
            _, sequence, context = bound([300], selector=selector)
            q, k, _ = global_qkv(sequence, 2, 1, 8)
            q[0, 77] = float("inf")  # on one rank
            with pytest.raises(SparseRingError, match="NaN or infinite"):
                _select(_shard(q, sequence)[0], _shard(k, sequence)[0], context)

    @pytest.mark.world_size(2)
    def test_a_ulysses_group_has_the_patterns_of_one_process(self) -> None:
        for selector in (KINDS[2], KINDS[3]):
            _, sequence, context = bound(LENGTHS, selector=selector, ulysses_degree=2)
            _, _, single = bound(LENGTHS, selector=selector, degree=1)
            q, k, _ = global_qkv(sequence, 4, 2, 8)
            heads = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
            mine = dense_mask(_select(q[heads], k[:1], context), 2, q.shape[1])
            assert torch.equal(mine, dense_mask(_select(q, k, single), 4, q.shape[1])[heads])
