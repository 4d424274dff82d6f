"""Binding a batch to a ring: what does not belong together is refused."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.config import FullSelector, SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.deepspeed import Setup
from ds_sparse_ring.integrations.transformers import attach, enable_gradient_checkpointing
from ds_sparse_ring.layout import Layout
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.slots import Slot

from .parity_model import VOCABULARY, tiny_model
from .reference import bound, global_qkv, packed_batch


def test_a_batch_of_another_layout_or_rank_is_refused() -> None:
    ring, sequence, _ = bound([300])
    for wrong in (
        dataclasses.replace(sequence, layout=Layout("contiguous", 1, sequence.layout.blocks)),
        dataclasses.replace(sequence, layout=Layout("striped", 2, 3)),
        dataclasses.replace(sequence, rank=1),
    ):
        with pytest.raises(SparseRingError, match="sharded as"):
            ring.bind(wrong)


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "message"),
    [
        ((2, 4, 320, 8), (2, 2, 320, 8), "do not fit this sequence"),
        ((1, 4, 256, 8), (1, 2, 256, 8), "do not fit this sequence"),
        ((1, 4, 320, 8), (1, 2, 640, 8), "KV cache"),
    ],
)
def test_tensors_that_are_not_of_the_sequence_are_refused(q_shape, k_shape, message: str) -> None:
    _, _, context = bound([300])
    with pytest.raises(SparseRingError, match=message):
        sparse_ring_attention(torch.zeros(q_shape), torch.zeros(k_shape), torch.zeros(k_shape), context, layer=0, scale=1.0)


def test_mixed_dtypes_and_values_of_other_heads_are_refused() -> None:
    _, _, context = bound([64])
    q, k = torch.zeros(1, 4, 64, 8), torch.zeros(1, 2, 64, 8)
    for wrong in (k.bfloat16(), k[:, :1], k[..., :4]):
        with pytest.raises(SparseRingError, match="one dtype and head size"):
            sparse_ring_attention(q, k, wrong, context, layer=0, scale=1.0)


@pytest.mark.parametrize("selector", [{"kind": "price", "price": 1e-3}, {"kind": "top_p", "p": 0.5}, {"kind": "full"}])
def test_under_autocast_attention_is_that_of_autocasts_dtype(selector: dict) -> None:
    _, sequence, context = bound([300], segment_tokens=128, selector=selector)
    q, k, v = (x[None].requires_grad_() for x in global_qkv(sequence, 2, 1, 16, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sparse_ring_attention(q, k, v.bfloat16(), context, layer=0, scale=0.25)
        mixed.float().sum().backward()
    plain = sparse_ring_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), context, layer=0, scale=0.25)
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, plain)
    assert q.grad is not None and q.grad.dtype == torch.float32 and torch.isfinite(q.grad).all()


def test_a_compiled_model_calls_attention_as_it_is_and_gradients_stay() -> None:
    _, sequence, context = bound([200])
    results = []
    for compiled in (False, True):
        q, k, v = (x[None].requires_grad_() for x in global_qkv(sequence, 2, 1, 16, dtype=torch.float32))

        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return sparse_ring_attention(2 * q, k, v, context, layer=0, scale=0.25).square().sum()

        run = torch.compile(layer, backend="eager") if compiled else layer
        loss = run(q, k, v)
        results.append([loss.detach(), *torch.autograd.grad(loss, (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    _, sequence, context = bound([100])
    q, k, v = (x[None].requires_grad_() for x in global_qkv(sequence, 2, 1, 16, dtype=dtype))
    out = sparse_ring_attention(q, k, v, context, layer=0, scale=0.25)
    assert {x.dtype for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))} == {dtype}


def test_a_second_derivative_is_refused_instead_of_wrong() -> None:
    _, sequence, context = bound([64])
    q, k, v = (x[None].requires_grad_() for x in global_qkv(sequence, 2, 1, 16))
    out = sparse_ring_attention(q, k, v, context, layer=0, scale=0.25)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_meter_stays_small_and_its_reports_have_the_same_keys_for_any_length() -> None:
    ring = SparseRing(SparseRingConfig(segment_tokens=64, heads_per_pattern=1, true_recall_rows=8))
    for lengths in ([300], [2], [1]):
        sequence = ring.sequence_batch(packed_batch(lengths))["sparse_ring"]
        q, k, v = (x[None] for x in global_qkv(sequence, 2, 1, 16))
        ring.meter.active = lengths != [1]
        sparse_ring_attention(q, k, v, ring.bind(sequence), layer=0, scale=0.25)
    (layer,) = ring.meter.pop()["per_layer"]
    assert set(layer["true_recall"]) == {"early", "middle", "late", "worst", "mean"}
    assert 0 < layer["density"] <= 1 and len(layer["head_density"]) == 2
    assert ring.meter.pop() == {}


def test_shards_first_made_in_inference_mode_serve_training() -> None:
    layout = Layout("striped", 1, 7)
    with torch.inference_mode():
        layout.token_ids(0)
    x = torch.zeros(7 * 64, requires_grad=True)
    layout.shard(x, 0).sum().backward()
    assert x.grad is not None and bool((x.grad == 1).all())


def test_counting_targets_of_nothing_is_refused() -> None:
    ring = SparseRing(SparseRingConfig())
    with pytest.raises(SparseRingError, match="needs batches with labels, but none was given"):
        ring.count_targets([])


def test_heads_per_pattern_that_does_not_fit_the_model_is_refused() -> None:
    _, _, context = bound([64], heads_per_pattern=3)
    q, k = torch.zeros(1, 8, 64, 8), torch.zeros(1, 2, 64, 8)
    with pytest.raises(SparseRingError, match="heads_per_pattern"):
        sparse_ring_attention(q, k, k, context, layer=0, scale=1.0)


def test_a_degree_without_a_process_group_is_refused() -> None:
    with pytest.raises(SparseRingError, match="not initialised"):
        SparseRing(SparseRingConfig(degree=2))


def test_warm_up_and_evaluation_choose_the_selector() -> None:
    ring = SparseRing(SparseRingConfig(dense_warmup_steps=2, eval_full_index=True))
    sequence = ring.sequence_batch(packed_batch([100]))["sparse_ring"]
    kinds = []
    for step, evaluating in ((0, False), (1, False), (2, False), (2, True)):
        ring.step, ring.evaluating = step, evaluating
        kinds.append(isinstance(ring.bind(sequence).selector, FullSelector))
    assert kinds == [True, True, False, True]


def test_two_rings_of_one_process_do_not_share_anything() -> None:
    first, second = bound([100], segment_tokens=64), bound([300], backend="torch")
    assert first[0].meter is not second[0].meter
    assert len(first[1].segments) == 2 and len(second[1].segments) == 1


def test_models_of_other_head_counts_take_turns_in_one_process() -> None:
    def first_pass(lengths: list[int], heads: int, kv_heads: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        _, sequence, context = bound(lengths, segment_tokens=64, selector={"kind": "price", "price": 1e-2})
        parts = [x[None].requires_grad_() for x in global_qkv(sequence, heads, kv_heads, 8)]
        q, k, v = parts
        return sparse_ring_attention(q, k, v, context, layer=0, scale=0.5), parts

    cases: list[tuple[list[int], int, int]] = [([200], 4, 2), ([90, 70], 6, 1)]
    alone = [torch.autograd.grad(out.square().sum(), parts) for out, parts in (first_pass(*case) for case in cases)]
    in_turns = [first_pass(*case) for case in cases]
    for (out, parts), expected in zip(in_turns, alone, strict=True):
        gradients = torch.autograd.grad(out.square().sum(), parts)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_memory_stays_flat_over_twenty_steps() -> None:
    ring = SparseRing(SparseRingConfig(segment_tokens=64, offload={"host_gib": 2**-10}, log_steps=1))
    model = tiny_model().train()
    enable_gradient_checkpointing(model)
    attach(model, ring)
    optimizer = torch.optim.AdamW(model.parameters())
    alive = []
    for step in range(20):
        ring.step, ring.meter.active = step, True
        model(**ring.sequence_batch(packed_batch([130, 60], vocabulary=VOCABULARY, seed=step))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ring.meter.pop()
        if step in (3, 19):
            gc.collect()
            tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
            alive.append((len(tensors), sum(x.numel() * x.element_size() for x in tensors)))
    assert alive[0] == alive[1]
    assert ring.spill is not None and ring.spill.store is not None
    assert ring.spill.store.numbers().to_device == 20 * 2 * 3, "inputs, outputs and sums of two layers went out and came back"


def test_the_set_up_says_how_many_sequences_a_step_takes() -> None:
    ring = SparseRing(SparseRingConfig())
    rows = dict(Setup(ring, zero_stage=2, micro_batch=2, accumulation=3, dtype="bfloat16", gradient_checkpointing=True).rows())
    assert rows["sequences per step"].startswith("6 = micro batch 2 x accumulation 3 x data axis 1 ")
    assert rows["DeepSpeed's train_batch_size"] == "6"


def test_a_replay_that_attends_more_often_than_the_first_pass_is_refused() -> None:
    slot: Slot[int] = Slot()
    slot.put(1)
    assert slot.take() is None, "the first pass takes nothing"
    slot.rewind()
    assert slot.take() == 1
    with pytest.raises(SparseRingError, match="more often"):
        slot.take()


def test_a_collator_pickles_and_shards_what_the_inner_one_made() -> None:
    import pickle

    ring = SparseRing(SparseRingConfig())
    collate = pickle.loads(pickle.dumps(ring.collator(_inner)))
    batch = collate([torch.arange(5), torch.arange(5)])
    assert batch["input_ids"].shape == (1, 128)
    assert int(ring.count_targets([batch, batch])) == 2 * 2 * 4


def _inner(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}
