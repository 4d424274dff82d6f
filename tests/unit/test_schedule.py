"""Schedules of sparsity: what layers choose by in each step, prices that move, indices that stay, random diagonals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ds_sparse_ring import attention
from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.config import FullSelector, PriceSelector, SparseRingConfig
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import FullIndex, Index, VerticalSlash, density
from ds_sparse_ring.integrations.deepspeed import Setup
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.layer_names import resolve_layers
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.select import select_index
from ds_sparse_ring.select.explore import explore
from tests.common import DistributedTest

from .reference import NoWaiting, bound, dense_mask, global_qkv, masked_attention, packed_batch
from .test_ring import _shard

SCALE = 0.25
PRICE = {"kind": "price"}
EVERY_QUERY = {"kind": "every_query", "price": 0.03, "window_blocks": 1}
NAMES = {f"model.layers.{layer}.self_attn": layer for layer in range(12)}


def _ring(**section: Any) -> SparseRing:
    window = {} if section.get("selector") == EVERY_QUERY else {"local_blocks": 1}
    return SparseRing(SparseRingConfig(**{"selector": PRICE, "segment_tokens": 128, **window, "backend": "torch", **section}))


def _training(ring: SparseRing, steps: range) -> Iterator[int]:
    for step in steps:
        ring.step = step
        yield step


# ---- dense layers


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([0, 3, -1], {0, 3, 11}),
        (["1-3", "10-"], {1, 2, 3, 10, 11}),
        (["model.layers.1"], {1}),
        (["*.layers.[79].self_attn", 0], {0, 7, 9}),
        (["*.1?"], {10, 11}),
        ([], set()),
    ],
)
def test_layers_are_named_by_number_range_or_module(entries: list[int | str], expected: set[int]) -> None:
    assert resolve_layers(entries, NAMES) == expected


@pytest.mark.parametrize(
    ("entry", "names", "message"),
    [
        (12, NAMES, "12 is beyond the 12 layers of the model: use 0 to 11"),
        (-13, NAMES, "-13 is beyond"),
        ("11-12", NAMES, "'11-12' is beyond"),
        ("12-", NAMES, "'12-' is beyond"),
        ("5-3", NAMES, "ends before it begins"),
        (
            "layers.3",
            NAMES,
            "'layers.3' is the name of no layer; an attention module of this model is 'model.layers.0.self_attn'",
        ),
        (-1, None, "-1 needs the model's layers: attach"),
        ("2-", None, "'2-' needs the model's layers"),
        ("*.3", None, "name_layers"),
    ],
)
def test_layers_that_there_are_not_are_refused(entry: int | str, names: dict[str, int] | None, message: str) -> None:
    with pytest.raises(SparseRingError, match=message):
        resolve_layers([entry], names)


def _tiny_model(layers: int = 2, sharp: float = 1.0) -> Any:
    """A model whose attention masses are the farther apart the sharper."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes))
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.data *= sharp
    return model


def test_dense_layers_are_dense_in_training_and_evaluation_and_the_others_are_not() -> None:
    ring, model = _ring(dense_layers=["*.layers.0", -1], selector={"kind": "price", "price": 0.01}), _tiny_model(3)
    attach(model, ring)
    batch = ring.sequence_batch(packed_batch([600]))
    for ring.evaluating in (False, True):
        ring.meter.active = True
        model(**batch)
        layers = ring.meter.pop()["per_layer"]
        assert [layer["density"] == 1 for layer in layers] == [True, False, True]


def test_attention_chooses_by_what_its_layer_has_of_its_own(chosen: list[Index]) -> None:
    _, sequence, context = bound([64 * 12], selector={"kind": "random_diagonals", "density": 0.3}, dense_layers=[1])
    q, k, v = (x[None] for x in global_qkv(sequence, 2, 1, 8))
    for layer in range(3):
        sparse_ring_attention(q, k, v, context, layer=layer, scale=SCALE)
    first, dense, last = chosen
    assert isinstance(dense, FullIndex) and isinstance(first, VerticalSlash) and isinstance(last, VerticalSlash)
    assert not first.equal(last), "random diagonals differ between layers"


def test_a_dense_layer_that_the_model_has_not_is_refused_when_it_is_attached() -> None:
    model = _tiny_model(3)
    with pytest.raises(SparseRingError, match="3 is beyond the 3 layers"):
        attach(model, _ring(dense_layers=[3]))
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(SparseRingError, match="needs the model's layers"):
        _attend(_ring(dense_layers=["*.layers.0"]), [100])


# ---- curriculum


def test_a_curriculum_moves_budgets_by_equal_factors_from_the_end_of_the_warm_up() -> None:
    start = {"kind": "top_p", "p": 0.25, "min_columns": 64, "min_slashes": 0}
    selector = {"kind": "top_p", "p": 1.0, "min_columns": 16, "min_slashes": 8}
    schedule = {"curriculum_steps": 4, "start_selector": start}
    ring = _ring(selector=selector, schedule=schedule, dense_warmup_steps=2)
    seen: list[Any] = [ring.schedule.training(step).selector for step in range(8)]
    assert seen[:2] == [FullSelector()] * 2
    assert [s.min_columns for s in seen[2:]] == [64, 45, 32, 23, 16, 16]
    assert [s.min_slashes for s in seen[2:]] == [0, 2, 4, 6, 8, 8], "a number that is 0 moves by equal differences"
    assert [s.p for s in seen[2:]] == pytest.approx([0.25, 0.25 * 2**0.5, 0.5, 0.5 * 2**0.5, 1.0, 1.0])
    assert seen[6] == ring.config.selector
    assert ring.schedule.evaluation(4).selector == seen[4]
    assert ring.schedule.evaluation(0).selector == seen[2], "warm-up is for training"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"curriculum_steps": 5}, "price", r"schedule.curriculum_steps = 5 needs start_selector"),
    ({"start_selector": {"kind": "price", "price": 1e-6}}, "price", "schedule.start_selector needs curriculum_steps"),
    ({"start_selector": {"kind": "price"}, "curriculum_steps": 5}, "fixed", 'of kind "price", the selector of kind "fixed"'),
    (
        {"start_selector": {"kind": "moba", "block_tokens": 64}, "curriculum_steps": 5},
        "moba",
        "schedule.start_selector.block_tokens = 64 cannot move to the selector's 512",
    ),
    (
        {"start_selector": {"kind": "top_p", "max_columns": 9}, "curriculum_steps": 5},
        "top_p",
        "start_selector.max_columns = 9 cannot move to the selector's null",
    ),
    ({"start_selector": {"kind": "price", "price": 2}}, "price", "schedule.start_selector.price = 2: should be less than 1"),
    ({"start_selector": {"kind": "cheap"}}, "price", 'schedule.start_selector.kind = "cheap" is unknown: use one of "price"'),
    ({"start_density": 0.5, "curriculum_steps": 5}, "price", "start_density = 0.5 needs target_density"),
    (
        {"start_selector": {"kind": "price"}, "curriculum_steps": 5, "target_density": 0.1},
        "price",
        "start_selector cannot stand beside target_density.*use start_density",
    ),
    ({"target_density": 5}, "price", "schedule.target_density = 5: should be less than or equal to 1"),
    (
        {"target_density": 0.1},
        "fixed",
        'target_density = 0.1 moves the price of "price", "every_query"; this selector is "fixed"',
    ),
    ({"min_layer_density": 0.1}, "moba", "min_layer_density = 0.1 moves the price"),
    ({"min_layer_density": 0.2, "target_density": 0.1}, "price", "min_layer_density = 0.2 is above target_density = 0.1"),
    ({"refresh_steps": 0}, "price", "schedule.refresh_steps = 0"),
    ({"refresh_steps": 2}, "window", 'refresh_steps = 2 has no effect on selector "window"'),
    ({"refresh_steps": 2}, "moba", 'reuse = "diagonals" fits.*"moba" chooses tokens of a text: use reuse = "index"'),
    ({"explore_diagonals": 2}, "moba", 'explore_diagonals = 2 fits the selectors .*, not "moba"'),
    ({"explore_steps": 2}, "price", "explore_steps = 2 needs explore_diagonals"),
    ({"refresh_step": 2}, "price", 'schedule.refresh_step is unknown: did you mean "refresh_steps"'),
]


@pytest.mark.parametrize(("schedule", "kind", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_schedule_that_cannot_be_is_refused_with_the_way_out(schedule: dict[str, Any], kind: str, message: str) -> None:
    with pytest.raises(SparseRingError, match=message):
        SparseRingConfig(selector={"kind": kind}, schedule=schedule)


def test_a_schedule_is_read_again_from_json() -> None:
    start = {"kind": "price", "price": 1e-6}
    config = SparseRingConfig(selector=PRICE, dense_layers=[0, "2-3"], schedule={"curriculum_steps": 5, "start_selector": start})
    assert SparseRingConfig(**json.loads(config.model_dump_json())) == config


def test_the_set_up_says_what_changes() -> None:
    schedule = {"target_density": 0.1, "start_density": 0.5, "curriculum_steps": 9, "refresh_steps": 4, "explore_diagonals": 2}
    ring = _ring(schedule=schedule, dense_layers=[0])
    rows = dict(Setup(ring, zero_stage=0, micro_batch=1, accumulation=1, dtype="float32", gradient_checkpointing=False).rows())
    for part in ("density 0.5 over 9 steps", "hold density 0.1", "every 4 steps", "2 random diagonals in every step"):
        assert part in rows["schedule"]
    assert "layers 0 always" in rows["selector"]


# ---- the price


def _attend(ring: SparseRing, lengths: list[int], layer: int = 0, seed: int = 0, sharp: float = 4.0) -> float:
    """What a layer reads in the ring's step, with masses that are the farther apart the sharper; its density."""
    sequence = ring.sequence_batch(packed_batch(lengths))["sparse_ring"]
    q, k = (_shard(x, sequence)[0] for x in global_qkv(sequence, 4, 2, 8, seed=seed)[:2])
    index = attention._choose(sharp * q, k, ring.bind(sequence).at_layer(layer).with_group(2), layer, SCALE)
    return float(density(index).mean())


@pytest.mark.parametrize(("price", "before"), [(1e-4, 0.9), (0.03, 0.2)])
def test_training_a_model_ends_at_the_density_that_is_asked_for(price: float, before: float) -> None:
    schedule = {"target_density": 0.3, "gain": 0.5}
    ring, model = _ring(selector={"kind": "price", "price": price}, schedule=schedule), _tiny_model(sharp=15.0)
    attach(model, ring)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    densities = []
    for step in _training(ring, range(18)):
        ring.meter.active = step in (0, 15, 16, 17)
        loss = model(**ring.sequence_batch(packed_batch([500], seed=step))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        densities += [ring.meter.pop()["density"]] if ring.meter.active else []
    assert (densities[0] > before) == (before > 0.3)
    assert densities[1:] == pytest.approx([0.3] * 3, rel=0.1)


@pytest.mark.parametrize("selector", [PRICE, EVERY_QUERY], ids=["price", "every_query"])
def test_the_density_follows_its_curriculum(selector: dict[str, Any]) -> None:
    ring = _ring(selector=selector, schedule={"target_density": 0.4, "start_density": 0.8, "curriculum_steps": 20, "gain": 0.5})
    densities = [_attend(ring, [500], sharp=8.0) for _ in _training(ring, range(32))]
    assert min(densities[:8]) > 0.6
    assert densities[-3:] == pytest.approx([0.4] * 3, rel=0.1)


def test_a_density_that_jumps_over_its_target_comes_to_rest() -> None:
    ring = _ring(schedule={"target_density": 0.5, "gain": 1.0})
    # about equal masses: a little less, and nearly all of them are kept; a little more, and nearly none
    densities = [_attend(ring, [500], sharp=0.1) for _ in _training(ring, range(60))]
    assert max(densities) > 0.9 and min(densities) < 0.25
    assert densities[-8:] == pytest.approx([0.5] * 8, abs=0.2)


def test_a_layer_below_the_floor_gets_a_lower_price_and_the_others_keep_theirs() -> None:
    ring = _ring(schedule={"min_layer_density": 0.5, "gain": 0.5}, selector={"kind": "price", "price": 1e-3})
    first: list[float] = []
    for _ in _training(ring, range(25)):
        both = [_attend(ring, [500], layer, sharp=sharp) for layer, sharp in ((0, 0.5), (1, 12.0))]
        first = first or both
    assert first[0] > 0.9 and first[1] < 0.4
    assert both == pytest.approx([first[0], 0.5], rel=0.1)
    step, controller = ring.schedule.training(ring.step), ring.schedule.controller
    assert step.selector_of(0) == step.selector == PriceSelector(price=1e-3)
    assert controller is not None and controller.lowered == [1]
    for _ in _training(ring, range(25, 37)):  # masses as flat as the other layer's
        _attend(ring, [500], 1, sharp=0.5)
    assert controller.lowered == [], "the one price is enough again"


def test_a_target_out_of_reach_leaves_the_price_at_its_bound() -> None:
    ring = _ring(schedule={"target_density": 0.001, "gain": 1.0})
    for _ in _training(ring, range(30)):
        _attend(ring, [300])
    assert ring.schedule.training(29).selector == PriceSelector(price=0.5)


def test_only_what_training_chooses_moves_the_price() -> None:
    schedule = {"target_density": 0.2, "refresh_steps": 50, "explore_diagonals": 3}
    ring = _ring(schedule=schedule, dense_layers=[1], dense_warmup_steps=2)
    prices = []
    for _ in _training(ring, range(8)):
        densities = [_attend(ring, [500]), _attend(ring, [500], layer=1)]
        ring.evaluating = True
        _attend(ring, [300])
        ring.evaluating = False
        prices.append(ring.schedule.controller.price if ring.schedule.controller else 0.0)
    assert densities[1] == 1
    moved = 1.5e-4 * (_attend(_ring(), [500]) / 0.2) ** 0.25
    # chosen in step 2 alone, after the warm-up; it counts from step 4 on
    assert prices == pytest.approx([1.5e-4] * 4 + [moved] * 4, rel=1e-5) and moved > 2e-4


def test_a_resumed_run_has_the_prices_of_one_that_was_not_stopped() -> None:
    section = {"schedule": {"target_density": 0.3, "min_layer_density": 0.25, "gain": 0.5}}

    def prices(ring: SparseRing, steps: range) -> list[Any]:
        seen = []
        for step in _training(ring, steps):
            for layer in range(2):
                _attend(ring, [700], layer, seed=step, sharp=2.0 + 8.0 * layer)
            plan = ring.schedule.training(step)
            seen.append([plan.selector_of(layer) for layer in range(2)])
        return seen

    whole = prices(_ring(**section), range(10))
    stopped = _ring(**section)
    first = prices(stopped, range(5))
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = _ring(**section)
    resumed.load_state_dict(state)
    assert whole == first + prices(resumed, range(5, 10)), "resumed"
    assert whole == first + prices(stopped, range(5, 10)), "saved, and gone on"
    assert whole[4] != whole[9] and whole[9][0] != whole[9][1]
    resumed.load_state_dict({})  # of a run without a controller
    assert _ring().state_dict() == {}


def test_what_a_layer_chose_is_noted_without_waiting() -> None:
    ring, sequence, context = bound([700], schedule={"target_density": 0.3}, segment_tokens=128)
    q, k, _ = global_qkv(sequence, 4, 2, 16)
    index = select_index(q, k, context, scale=SCALE)
    density(index)  # makes tables of the segments
    assert ring.schedule.controller is not None
    with NoWaiting():
        ring.schedule.controller.record(0, index, chosen=True)


# ---- reuse


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Index]:
    """All that was chosen, in order."""
    made: list[Index] = []

    def spy(q: Tensor, k: Tensor, context: SequenceContext, **options: Any) -> Index:
        made.append(select_index(q, k, context, **options))
        return made[-1]

    monkeypatch.setattr(attention, "select_index", spy)
    return made


def test_layers_choose_every_so_many_steps_and_for_other_documents(chosen: list[Index]) -> None:
    ring = _ring(schedule={"refresh_steps": 3}, dense_warmup_steps=1)
    counts = []
    for step in _training(ring, range(9)):
        for layer in range(2):
            _attend(ring, [700] if step < 7 else [650, 50], layer, seed=step)
        counts.append(len(chosen))
        chosen.clear()
    # dense; refresh at 1, 4 and 7; from step 7 on other documents, which are kept in turn
    assert counts == [2, 2, 0, 0, 2, 0, 0, 2, 0]
    _attend(ring, [700])
    assert len(chosen) == 1, "what was kept for other documents is not read"
    ring.evaluating = True
    _attend(ring, [700])
    assert len(chosen) == 2, "evaluation chooses for its own text"


def test_in_a_refresh_every_micro_batch_chooses_and_the_last_ones_choice_stays(chosen: list[Index]) -> None:
    ring = _ring(schedule={"refresh_steps": 2, "reuse": "index"})
    for seed in range(2):
        _attend(ring, [700], seed=seed)
    assert len(chosen) == 2
    ring.step = 1
    context = ring.bind(ring.sequence_batch(packed_batch([700]))["sparse_ring"])
    assert context.step is not None and context.step.kept(0, context.segments, 4) is chosen[1]


@pytest.mark.parametrize("probe", ["own", "previous"])
def test_diagonals_stay_and_columns_of_a_text_do_not(probe: str, chosen: list[Index]) -> None:
    ring = _ring(schedule={"refresh_steps": 2}, probe=probe, selector={"kind": "price", "price": 0.004})
    for step in _training(ring, range(2)):
        sequence = ring.sequence_batch(packed_batch([700, 100]))["sparse_ring"]
        q, k, v = (x[None].requires_grad_() for x in global_qkv(sequence, 4, 2, 16, seed=step))
        context = ring.bind(sequence)
        out = sparse_ring_attention(4 * q, k, v, context, layer=0, scale=SCALE)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    (index,), kept = chosen, context.step.kept(0, sequence.segments, 4) if context.step else None
    assert isinstance(index, VerticalSlash) and isinstance(kept, VerticalSlash)
    assert torch.equal(kept.diagonal_ptr, index.diagonal_ptr) and torch.equal(kept.diagonal_values, index.diagonal_values)
    assert index.column_values.numel() > kept.column_values.numel() > 0
    assert all(int(token) % 704 < 4 for token in kept.column_values), "first tokens of the documents"
    visible = dense_mask(kept, 4, q.shape[2])
    first = torch.stack([torch.arange(q.shape[2]) % 704 < 4] * q.shape[2]).tril()
    first[704:, :704] = False
    assert visible[:, first][:, :4].all(), "of every head"
    q2, k2, v2 = (x[0].detach().requires_grad_() for x in (q, k, v))
    expected = masked_attention(4 * q2, k2, v2, visible, SCALE)
    torch.testing.assert_close(out[0].transpose(0, 1), expected)
    for got, want in zip(gradients, torch.autograd.grad(expected.square().sum(), (q2, k2, v2)), strict=True):
        torch.testing.assert_close(got[0], want)


# ---- exploration


def _offsets(index: VerticalSlash, segment: int, pattern: int) -> set[int]:
    return set(index.diagonals(segment, pattern).tolist())


def test_exploration_adds_so_many_random_diagonals_of_its_own_to_each_step_layer_and_pattern() -> None:
    _, sequence, context = bound([64 * 40, 64, 64 * 3], segment_tokens=64 * 20, selector={"kind": "price", "price": 0.4})
    q, k, _ = global_qkv(sequence, 4, 2, 8)
    index = select_index(q, k, context, scale=0.01)
    assert isinstance(index, VerticalSlash)
    added = []
    for step, layer in ((0, 0), (1, 0), (0, 1)):
        more = explore(index, context.at_layer(layer), 5, step)
        assert torch.equal(more.column_values, index.column_values)
        added.append([_offsets(more, s, p) - _offsets(index, s, p) for s in range(2) for p in range(4)])
        for s, segment in enumerate(sequence.segments):
            reach = 1 if segment.is_padding else segment.end - segment.document_begin
            for p in range(4):
                assert _offsets(index, s, p) <= _offsets(more, s, p) <= set(range(reach))
        assert all(3 <= len(new) <= 5 for new in added[-1]), "at most those are there already that are nearest"
        assert _offsets(more, 3, 0) == {0, 1, 2}, "all of a document that has fewer"
        assert len({frozenset(new) for new in added[-1]}) > 6
    assert added[0] != added[1] and added[0] != added[2]


def test_every_distance_is_explored_as_often_as_any_other() -> None:
    _, sequence, context = bound([64 * 12], segment_tokens=None, selector={"kind": "price", "price": 0.9})
    q, k, _ = global_qkv(sequence, 8, 8, 8)
    index = select_index(q, k, context, scale=0.01)
    assert isinstance(index, VerticalSlash)
    counts = torch.zeros(12)
    for step in range(100):
        counts += torch.bincount(explore(index, context, 3, step).diagonal_values, minlength=12)
    share = counts[2:] / 800
    assert (share - 3 / 11).abs().max() < 5 * (3 / 11 * 8 / 11 / 800) ** 0.5


def test_training_explores_in_every_so_many_steps() -> None:
    ring, plain = _ring(schedule={"explore_diagonals": 2, "explore_steps": 3}, dense_warmup_steps=1), _ring()
    chosen = _attend(plain, [1500])
    more = [_attend(ring, [1500]) > chosen for _ in _training(ring, range(8))]
    assert more == [True, True, False, False, True, False, False, True]  # the first one is dense


# ---- several ranks


class TestSchedulesOnRings(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(("degree", "selector"), [(1, PRICE), (2, PRICE), (2, EVERY_QUERY)])
    def test_every_rank_has_the_same_prices_and_the_density_is_that_of_all(self, degree: int, selector: dict[str, Any]) -> None:
        ring = _ring(degree=degree, selector=selector, schedule={"target_density": 0.3, "min_layer_density": 0.2, "gain": 0.5})
        for step in _training(ring, range(18)):
            seed = step if degree == 2 else 100 * step + dist.get_rank()
            densities = [_attend(ring, [700], layer, seed, sharp=sharp) for layer, sharp in ((0, 1.0), (1, 12.0))]
        prices = [[ring.schedule.training(17).selector_of(layer) for layer in range(2)]]
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, prices)
        assert everyone[0] == everyone[1]
        assert sum(densities) / 2 == pytest.approx(0.3, rel=0.15)

    def test_one_rank_may_choose_for_other_documents_while_the_other_reuses(self) -> None:
        ring = _ring(degree=1, schedule={"target_density": 0.3, "refresh_steps": 4})
        for step in _training(ring, range(6)):
            _attend(ring, [700] if dist.get_rank() or step == 0 else [600, 64 + step])
        states: list[Any] = [None, None]
        dist.all_gather_object(states, ring.state_dict())
        assert states[0] == states[1] and states[0]["controller"]["log_price"] != 0

    @pytest.mark.parametrize("ulysses", [1, 2])
    def test_exploration_and_reuse_are_those_of_one_process(self, ulysses: int) -> None:
        schedule = {"refresh_steps": 2, "explore_diagonals": 2}
        outputs = []
        for degree in (2, 1):
            ring = _ring(degree=degree, ulysses_degree=ulysses if degree == 2 else 1, schedule=schedule)
            for step in _training(ring, range(2)):
                sequence = ring.sequence_batch(packed_batch([768]))["sparse_ring"]
                q, k, v = (_shard(x, sequence) for x in global_qkv(sequence, 4, 2, 16, seed=step))
                out = sparse_ring_attention(4 * q, k, v, ring.bind(sequence), layer=1, scale=SCALE)
                outputs.append(ring.gather(out, sequence))
        torch.testing.assert_close(outputs[0], outputs[2])
        torch.testing.assert_close(outputs[1], outputs[3])
