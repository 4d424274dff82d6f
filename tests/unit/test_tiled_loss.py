"""The tiled loss against the model's own, and the count of floating-point operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_sparse_ring.batch import IGNORE
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.flops import matrix_parameters, step_flops
from ds_sparse_ring.integrations.tiled_loss import enable_tiled_loss

SIZES: Any = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tile_tokens", [1, 7, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_equal_the_models_own(tile_tokens: int, tied: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).double()
    tiled = copy.deepcopy(model)
    enable_tiled_loss(tiled, tile_tokens)
    ids = torch.randint(50, (1, 33))
    labels = torch.randint(50, (1, 33))
    labels[0, [0, 5, 32]] = IGNORE
    count = torch.tensor(11)
    batch = {"input_ids": ids, "labels": labels, "shift_labels": labels, "num_items_in_batch": count}
    losses = [m(**batch).loss for m in (model, tiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)  # the loss itself is computed in float32 by both
    for (name, a), b in zip(model.named_parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_a_shard_without_targets_contributes_an_exact_zero() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    enable_tiled_loss(model, 8)
    labels = torch.full((1, 20), IGNORE)
    loss = model(input_ids=torch.randint(50, (1, 20)), shift_labels=labels, num_items_in_batch=torch.tensor(5)).loss
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_batches_without_shifted_labels_take_the_models_own_way() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ids = torch.randint(50, (1, 20))
    expected = model(input_ids=ids, labels=ids)
    enable_tiled_loss(model, 8)
    got = model(input_ids=ids, labels=ids)
    assert torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)


def test_a_model_that_may_change_its_logits_is_refused() -> None:
    model = GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8))
    with pytest.raises(SparseRingError, match="GemmaForCausalLM may do more to its logits"):
        enable_tiled_loss(model, 8)


def test_flops_count_products_and_attention_pairs() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    layer = 32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48
    assert matrix_parameters(model) == 2 * layer + 50 * 32, "the tied last layer multiplies, too"
    assert step_flops(model.config, 1000, 10, pairs=55.0) == 6 * 1000 * 10 + 12 * 8 * 4 * 2 * 55
