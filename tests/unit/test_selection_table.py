"""The selection table measures what the model really computes, and says truthfully whether the aim is met."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ds_sparse_ring.config import FullSelector, PriceSelector, SparseRingConfig
from ds_sparse_ring.train.selection_table import Kept, Setting, capture, markdown, measure, settings, verdict

TOKENS = 256


@pytest.fixture(scope="module")
def captured() -> tuple[torch.Tensor, dict[int, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(64, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    layers = capture(model, ids, [0, 1])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions[1][0]
    return ids, layers, attention


def test_captured_queries_and_keys_give_the_attention_of_the_model(captured) -> None:
    _, layers, attention = captured
    q, k = layers[1]
    assert q.shape == (4, TOKENS, 8) and k.shape == (2, TOKENS, 8)
    scores = (q @ k.repeat_interleave(2, 0).mT * 8**-0.5).masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), float("-inf"))
    torch.testing.assert_close(scores.softmax(-1), attention)


def test_dense_keeps_all_and_sparse_keeps_less(captured) -> None:
    ids, layers, _ = captured
    dense = measure(SparseRingConfig(selector=FullSelector()), ids, layers, rows=64)
    assert (dense.density, dense.worst) == (1.0, pytest.approx(1.0, abs=1e-5))
    sparse = measure(SparseRingConfig(selector=PriceSelector(price=0.9), segment_tokens=64), ids, layers, rows=64)
    assert sparse.density < 0.75 and sparse.worst <= sparse.middle < 0.99
    assert sparse.early > sparse.late  # two forced diagonals cover more of a short past


def test_verdict_takes_the_price_nearest_to_the_density_of_the_aim() -> None:
    lines = settings()
    low, high = (s for s in lines if s.segments == "1024" and s.selection in ("price 0.00015", "price 7e-05"))
    table = [(low, Kept(0.054, 0.9, 0.91, 0.9, 0.5)), (high, Kept(0.12, 0.9, 0.80, 0.9, 0.5))]
    assert verdict(table) == (True, verdict(table)[1]) and "reached" in verdict(table)[1]
    table[0] = (low, Kept(0.054, 0.9, 0.89, 0.9, 0.5))
    assert verdict(table)[0] is False and "MISSED" in verdict(table)[1]
    assert "| 1024 | price 0.00015 | 0.054 | 0.900 | 0.890 | 0.900 | 0.500 |" in markdown(table)
    assert isinstance(low, Setting)
