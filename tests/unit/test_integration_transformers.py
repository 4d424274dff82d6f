"""Models of Transformers: which are refused, what reaches attention, and what whole rows do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations import transformers as integration
from ds_sparse_ring.integrations.model_checks import check_model, positions_of
from ds_sparse_ring.integrations.transformers import attach, enable_gradient_checkpointing
from ds_sparse_ring.runtime import SparseRing
from tests.unit.parity_model import MODELS, Row, make_batch, section, tiny_model

ROWS = [Row((150, 40)), Row((70,), left=5, right=9)]


@pytest.fixture
def ring() -> SparseRing:
    return SparseRing(SparseRingConfig(**section("price")))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Contexts that reach attention."""
    contexts: list[Any] = []
    attention = integration.sparse_ring_attention

    def spy(q: Any, k: Any, v: Any, context: Any, **kwargs: Any) -> Any:
        contexts.append((kwargs["layer"], context))
        return attention(q, k, v, context, **kwargs)

    monkeypatch.setattr(integration, "sparse_ring_attention", spy)
    yield contexts


def config_of(kind: type, **values: Any) -> Any:
    return kind(**{"num_attention_heads": 4, "num_key_value_heads": 2, **values})


class TestModelsThatAreRefused:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (config_of(GemmaConfig), "model_type"),
            (config_of(MistralConfig, sliding_window=4096), "sliding_window = null"),
            (config_of(Qwen2Config, use_sliding_window=True, max_window_layers=1), "layer_types"),
            (config_of(LlamaConfig, attention_dropout=0.1), "attention_dropout"),
            (config_of(LlamaConfig, attn_logit_softcapping=30.0), "soft cap"),
            (config_of(LlamaConfig, is_causal=False), "causal"),
            (config_of(LlamaConfig, add_cross_attention=True), "cross"),
            (config_of(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "yarn"),
        ],
        ids=["model_type", "window", "layer_types", "dropout", "soft_cap", "not_causal", "cross_attention", "rope"],
    )
    def test_what_the_kernels_lack_is_refused_at_load(self, config: Any, message: str) -> None:
        with pytest.raises(SparseRingError, match=message):
            check_model(config, SparseRingConfig())

    def test_windows_that_no_layer_uses_are_accepted(self) -> None:
        check_model(config_of(Qwen2Config, use_sliding_window=False, sliding_window=4096), SparseRingConfig())
        check_model(config_of(MistralConfig, sliding_window=None), SparseRingConfig())

    def test_patterns_that_cross_kv_heads_are_refused(self) -> None:
        with pytest.raises(SparseRingError, match="heads_per_pattern"):
            check_model(config_of(LlamaConfig), SparseRingConfig(heads_per_pattern=4))

    def test_something_that_is_no_transformers_model_is_refused(self, ring: SparseRing) -> None:
        with pytest.raises(SparseRingError, match="Linear"):
            attach(nn.Linear(2, 2), ring)


class TestAttachment:
    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_one_context_of_the_batch_reaches_every_layer_once_and_again_in_its_replay(
        self, kind: str, checkpointing: bool, ring: SparseRing, seen: list[Any]
    ) -> None:
        model = tiny_model(kind).train()
        attach(model, ring)
        if checkpointing:
            enable_gradient_checkpointing(model)
        batch = ring.sequence_batch(make_batch(ROWS, 1))
        model(**batch).loss.backward()
        assert [layer for layer, _ in seen] == ([0, 1, 1, 0] if checkpointing else [0, 1])
        assert all(context is seen[0][1] for _, context in seen)
        assert seen[0][1].segments == batch["sparse_ring"].segments

    def test_attaching_twice_changes_nothing_and_detaching_restores(self, ring: SparseRing) -> None:
        model = tiny_model()
        before = model.config._attn_implementation
        attachment = attach(model, ring)
        assert attach(model, ring) is attachment
        assert model.config._attn_implementation == "sparse_ring"
        attachment.detach()
        attachment.detach()
        assert model.config._attn_implementation == before
        assert not model.model._forward_pre_hooks
        assert attach(model, ring) is not attachment

    def test_a_second_ring_is_refused_until_the_first_is_detached(self, ring: SparseRing) -> None:
        model = tiny_model()
        with attach(model, ring), pytest.raises(SparseRingError, match="detach"):
            attach(model, SparseRing(ring.config))
        attach(model, SparseRing(ring.config))

    def test_two_models_of_one_process_have_their_own_rings(self, ring: SparseRing, seen: list[Any]) -> None:
        other = SparseRing(SparseRingConfig(**section("full")))
        models = [tiny_model().eval(), tiny_model().eval()]
        attach(models[0], ring)
        attach(models[1], other)
        batch = make_batch(ROWS, 1)
        with torch.no_grad():
            models[0](**ring.sequence_batch(batch))
            models[1](**other.sequence_batch(batch))
        assert [context.config for _, context in seen] == [ring.config] * 2 + [other.config] * 2

    def test_a_copied_model_stays_attached(self, ring: SparseRing, seen: list[Any]) -> None:
        model = tiny_model()
        attach(model, ring)
        with torch.no_grad():
            copy.deepcopy(model)(**ring.sequence_batch(make_batch(ROWS, 1)))
        assert len(seen) == 2

    def test_a_wrapper_that_calls_forward_of_the_model_is_recognised(self, ring: SparseRing, seen: list[Any]) -> None:
        class Wrapper(nn.Module):  # PEFT's shape: base model inside, its forward called past its hooks
            def __init__(self, base: nn.Module) -> None:
                super().__init__()
                self.base = base

            def get_base_model(self) -> nn.Module:
                return self.base

            def forward(self, **kwargs: Any) -> Any:
                return self.base.forward(**kwargs)

        model = Wrapper(tiny_model())
        attach(model, ring)
        model(**ring.sequence_batch(make_batch(ROWS, 1)))
        assert len(seen) == 2

    def test_the_saved_configuration_knows_nothing_of_us(self, ring: SparseRing, tmp_path: Any) -> None:
        model = tiny_model()
        attach(model, ring)
        model.save_pretrained(tmp_path)
        assert "sparse_ring" not in (tmp_path / "config.json").read_text()
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


class TestArgumentsOfAttention:
    @pytest.mark.parametrize(
        "extra",
        [
            {"softcap": 30.0},
            {"sliding_window": 128},
            {"s_aux": torch.zeros(4)},
            {"cu_seq_lens_q": torch.tensor([0, 4])},
            {"is_causal": False},
            {"output_attentions": True},
            {"something_new": 1},
        ],
        ids=lambda extra: next(iter(extra)),
    )
    @pytest.mark.parametrize("sharded", [True, False])
    def test_what_may_change_the_result_raises(self, extra: dict[str, Any], sharded: bool, ring: SparseRing) -> None:
        model = tiny_model().eval()
        attach(model, ring)
        batch = make_batch([Row((100,))], 1)
        plain = {"input_ids": batch["input_ids"]}
        with torch.no_grad(), pytest.raises(SparseRingError, match=next(iter(extra))):
            model(**(ring.sequence_batch(batch) if sharded else plain), **extra)

    def test_dropout_raises(self, ring: SparseRing) -> None:
        model = tiny_model().train()
        attach(model, ring)
        model.model.layers[1].self_attn.attention_dropout = 0.1
        with pytest.raises(SparseRingError, match="dropout"):
            model(**ring.sequence_batch(make_batch(ROWS, 1)))

    def test_a_kv_cache_with_a_sharded_sequence_is_refused(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        attach(model, ring)
        with pytest.raises(SparseRingError, match="KV cache"):
            model(**ring.sequence_batch(make_batch(ROWS, 1)), use_cache=True)

    def test_no_kv_cache_is_made_for_a_sharded_sequence(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        assert model.config.use_cache
        attach(model, ring)
        with torch.no_grad():
            output = model(**ring.sequence_batch(make_batch(ROWS, 1)))
        assert "cache" not in output
        assert "past_key_values" not in output

    def test_a_mask_with_a_sharded_sequence_is_refused(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        attach(model, ring)
        batch = ring.sequence_batch(make_batch(ROWS, 1))
        with pytest.raises(SparseRingError, match="sequence_batch"):
            model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))

    def test_training_on_whole_rows_is_refused(self, ring: SparseRing) -> None:
        model = tiny_model().train()
        attach(model, ring)
        with pytest.raises(SparseRingError, match=r"SparseRing\.collator"):
            model(input_ids=torch.ones(1, 8, dtype=torch.int64))

    def test_a_model_that_is_not_attached_says_so(self, ring: SparseRing) -> None:
        integration.register()
        model = tiny_model()
        model.set_attn_implementation("sparse_ring")
        with pytest.raises(SparseRingError, match=r"attach\(model, ring\)"):
            model(**ring.sequence_batch(make_batch(ROWS, 1)))

    def test_checkpointing_without_our_context_is_refused(self, ring: SparseRing) -> None:
        model = tiny_model().train()
        attach(model, ring)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with pytest.raises(SparseRingError, match="enable_gradient_checkpointing"):
            model(**ring.sequence_batch(make_batch(ROWS, 1)))

    def test_reentrant_checkpointing_is_refused(self) -> None:
        model = tiny_model()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        with pytest.raises(SparseRingError, match="use_reentrant"):
            integration.adopt_gradient_checkpointing(model)


class TestWholeRows:
    """Evaluation and generation without a sharded sequence are those of Transformers."""

    def test_logits_equal_those_of_sdpa_with_padding(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        batch = make_batch([Row((60,), left=4), Row((30,), right=34)], 1)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        with torch.no_grad():
            expected = model(**inputs).logits
            with attach(model, ring):
                actual = model(**inputs).logits
        valid = batch["attention_mask"].bool()
        torch.testing.assert_close(actual[valid], expected[valid], rtol=0, atol=0)

    @pytest.mark.parametrize("use_cache", [True, False])
    def test_generation_equals_that_of_sdpa(self, use_cache: bool, ring: SparseRing) -> None:
        model = tiny_model().eval()
        prompt = torch.tensor([[0, 0, 5, 9, 3], [7, 2, 8, 4, 6]])
        arguments = {
            "attention_mask": (prompt != 0).long(),
            "max_new_tokens": 12,
            "do_sample": False,
            "use_cache": use_cache,
            "eos_token_id": None,
        }
        expected = model.generate(prompt, **arguments)
        with attach(model, ring):
            assert torch.equal(model.generate(prompt, **arguments), expected)

    def test_continuing_a_cache_by_several_tokens_without_a_mask(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        tokens = torch.randint(1, 64, (1, 20))
        with torch.no_grad(), attach(model, ring):
            whole = model(input_ids=tokens).logits
            cache = model(input_ids=tokens[:, :12], use_cache=True).past_key_values
            rest = model(input_ids=tokens[:, 12:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(rest, whole[:, 12:], rtol=1e-4, atol=1e-4)

    def test_packed_rows_are_refused_not_mixed(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        attach(model, ring)
        batch = make_batch([Row((30, 20))], 1)
        with pytest.raises(SparseRingError, match="each other"):
            model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])

    def test_a_packed_row_has_the_loss_of_its_documents_one_by_one(self) -> None:
        ring, model, lengths = SparseRing(SparseRingConfig(**section("full"))), tiny_model().eval(), [30, 7, 90]
        batch = make_batch([Row((sum(lengths),))], 1)
        tokens = batch["input_ids"]
        documents = tokens.split(lengths, dim=1)
        with torch.no_grad():
            alone = sum(float(model(input_ids=x, labels=x).loss) * (x.shape[1] - 1) for x in documents)
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            given = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
            with attach(model, ring):
                packed = model(**ring.sequence_batch(given), num_items_in_batch=1).loss
                mixed = model(**ring.sequence_batch({**given, "position_ids": None}), num_items_in_batch=1).loss
        assert float(packed) == pytest.approx(alone, rel=1e-5)
        assert abs(float(mixed) - alone) > 1, "as one document they see each other"

    def test_no_mask_is_built_for_a_shard(self, ring: SparseRing, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_mask(*_: Any, **__: Any) -> None:
            raise AssertionError("a mask of n * n entries was built")

        monkeypatch.setattr(integration, "sdpa_mask", no_mask)
        model = tiny_model().eval()
        attach(model, ring)
        with torch.no_grad():
            model(**ring.sequence_batch(make_batch(ROWS, 1)))


class TestDocumentsBeyondTheModelsPositions:
    def test_the_first_one_is_warned_of_and_shorter_ones_in_a_longer_row_are_not(self, ring: SparseRing) -> None:
        model = tiny_model().eval()
        model.config.max_position_embeddings = 64
        attach(model, ring)
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**ring.sequence_batch(make_batch([Row((64, 40))], 1)))
            assert not caught
            for _ in range(2):
                model(**ring.sequence_batch(make_batch([Row((20, 65))], 1)))
        (one,) = caught
        assert "65 tokens" in str(one.message) and "--yarn_from 64" in str(one.message)

    @pytest.mark.parametrize(
        ("rope", "positions"),
        [
            ({"rope_type": "default"}, 100),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
            ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 25}, 100),
            ({"rope_type": "linear", "factor": 2.0}, 200),
            ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 10}, 100),
        ],
    )
    def test_a_factor_beside_the_length_before_it_counts(self, rope: dict[str, Any], positions: int) -> None:
        config = LlamaConfig(max_position_embeddings=100)
        config.rope_parameters = {"rope_theta": 1e4, **rope}
        assert positions_of(config) == positions
