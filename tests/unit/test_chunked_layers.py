"""Decoder layers that work in chunks: gradients of whole layers, less memory, parameters gathered once."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from ds_sparse_ring import slots
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.chunked_layers import enable_chunked_layers, is_chunked
from ds_sparse_ring.integrations.deepspeed import Setup
from ds_sparse_ring.integrations.tiled_loss import enable_tiled_loss
from ds_sparse_ring.integrations.transformers import attach, enable_gradient_checkpointing
from ds_sparse_ring.kernels import torch_reference
from ds_sparse_ring.runtime import SparseRing
from tests.common import DistributedTest
from tests.offloading import GIB_OF_A_MIB
from tests.unit.parity_model import MODELS, Row, make_batch, section, tiny_model
from tests.unit.test_parity_gradients import PACKED, PADDED, ZERO, Run, check_against_one_process
from tests.unit.trainer_runs import arguments, ds_config, make_rows, make_trainer, plain_training

ROWS = [Row((130, 157, 3))]
TOKENS = 192 + 192 + 64
"""Of the shard of ``ROWS`` on one rank: whole blocks."""

CHUNKS = {"one": TOKENS, "eight": TOKENS // 8, "the last is short": 37}


def one_rank(chunk_tokens: int | None, selector: str = "price", **values: Any) -> SparseRing:
    """A ring of this process alone, on the CPU."""
    own: dict[str, Any] = {"degree": 1, "backend": "cpu", "layer_chunk_tokens": chunk_tokens, **values}
    ring = SparseRing(SparseRingConfig(**section(selector, **own)))
    ring.meter.active = False
    return ring


def loss_of(model: nn.Module, ring: SparseRing) -> Tensor:
    attach(model, ring)
    batch = ring.sequence_batch(make_batch(ROWS, seed=1))
    loss: Tensor = model(**batch, num_items_in_batch=100).loss
    return loss


def trained(model: nn.Module, ring: SparseRing) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of every parameter."""
    loss = loss_of(model, ring)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(got: tuple[Tensor, dict[str, Any]], expected: tuple[Tensor, dict[str, Any]], tolerance: float) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=0)
    for name, gradient in expected[1].items():
        if gradient is None:
            assert got[1][name] is None, name
            continue
        assert float((got[1][name] - gradient).abs().max()) <= tolerance * float(gradient.abs().max()), name


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, in PEFT's shape."""

    def __init__(self, base_layer: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False, dtype=base_layer.weight.dtype)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False, dtype=base_layer.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(self.lora_dropout(x)))


def adapted_model(dropout: float = 0.0) -> Any:
    model: Any = tiny_model().double().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, dropout)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj, dropout)
    return model


class TestGradientsEqualThoseOfWholeLayers:
    @pytest.mark.parametrize("chunk_tokens", CHUNKS.values(), ids=CHUNKS)
    @pytest.mark.parametrize("kind", MODELS)
    def test_of_each_architecture(self, kind: str, chunk_tokens: int) -> None:
        model, selector = tiny_model(kind).double(), "every_query" if kind == "qwen2" else "price"
        expected = trained(copy.deepcopy(model), one_rank(None, selector))
        assert_same(trained(copy.deepcopy(model), one_rank(chunk_tokens, selector)), expected, 1e-12)

    @pytest.mark.parametrize("keep", ["output", "index"])
    def test_whether_or_not_checkpointing_is_on(self, keep: str) -> None:
        model = tiny_model().double()
        expected = trained(copy.deepcopy(model), one_rank(None))
        enable_gradient_checkpointing(model)
        calls: list[int] = []
        norm = model.model.layers[0].input_layernorm
        norm.register_forward_hook(lambda *_: calls.append(1))
        assert_same(trained(model, one_rank(TOKENS // 8, checkpoint=keep)), expected, 1e-12)
        assert len(calls) == 3 * 8, "each pass computes q, k and v of a chunk; the backward pass once more with a graph"

    @pytest.mark.parametrize("backward_too", [False, True])
    @pytest.mark.parametrize("mixed", [False, True])
    def test_under_autocast_and_in_bfloat16(self, mixed: bool, backward_too: bool) -> None:
        model = tiny_model("qwen3") if mixed else tiny_model("qwen3").bfloat16()
        results = []
        for chunk_tokens in (None, 37):
            copied = copy.deepcopy(model)
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = loss_of(copied, one_rank(chunk_tokens))
                if backward_too:
                    loss.backward()
            if not backward_too:
                loss.backward()
            results.append((loss.detach(), {name: p.grad for name, p in copied.named_parameters()}))
        assert_same(results[1], results[0], 0.03)

    def test_with_adapters_on_frozen_layers(self) -> None:
        model = adapted_model()
        expected = trained(copy.deepcopy(model), one_rank(None))
        got = trained(model, one_rank(37))
        assert_same(got, expected, 1e-12)
        assert sum(gradient is not None for gradient in got[1].values()) == 2 * 4

    @pytest.mark.parametrize("part", ["v_proj", "mlp", "q_norm", "o_proj"])
    def test_with_one_part_trained_and_an_input_without_gradient(self, part: str) -> None:
        model = tiny_model("qwen3").double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part in name)
        expected = trained(copy.deepcopy(model), one_rank(None))
        assert_same(trained(model, one_rank(37)), expected, 1e-12)

    def test_of_a_copied_model_and_not_of_the_one_it_was_copied_from(self) -> None:
        model = tiny_model().double()
        expected = trained(copy.deepcopy(model), one_rank(None))
        ring = one_rank(37)
        attach(model, ring)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_same(trained(copied, ring), expected, 1e-12)
        assert all(p.grad is None for p in model.parameters())

    def test_of_a_compiled_model(self) -> None:
        model = tiny_model().double()
        expected = trained(copy.deepcopy(model), one_rank(None))
        ring = one_rank(37)
        attach(model, ring)
        batch = ring.sequence_batch(make_batch(ROWS, seed=1))
        loss = torch.compile(model, backend="eager")(**batch, num_items_in_batch=100).loss
        loss.backward()
        assert_same((loss.detach(), {name: p.grad for name, p in model.named_parameters()}), expected, 1e-12)

    @pytest.mark.parametrize("keep", ["output", "index"])
    def test_with_keys_and_values_in_host_memory(self, keep: str) -> None:
        model = tiny_model().double()
        offload = {"host_gib": 2 * GIB_OF_A_MIB, "kv_page_tokens": 128}
        results, rings = [], []
        sections: list[dict[str, Any]] = [{}, {"offload": offload, "checkpoint": keep}]
        for values in sections:
            rings.append(one_rank(TOKENS // 8, **values))
            results.append(trained(copy.deepcopy(model), rings[-1]))
        assert_same(results[1], results[0], 1e-12)
        assert rings[1].spill is not None and rings[1].spill.store is not None
        # of two layers: x, four pages, and o and lse
        assert rings[1].spill.store.numbers().to_device == 2 * (1 + 4 + (2 if keep == "output" else 0))

    def test_when_the_graph_is_kept_for_a_second_pass(self) -> None:
        model = tiny_model().double()
        expected = trained(copy.deepcopy(model), one_rank(None))
        loss = loss_of(model, one_rank(37))
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same((loss.detach(), {name: p.grad / 2 for name, p in model.named_parameters()}), expected, 1e-12)  # type: ignore[operator]


class TestWithoutGradients:
    def test_evaluation_gives_the_same_logits_and_keeps_nothing(self) -> None:
        model = tiny_model().double().eval()
        ring = one_rank(37, offload={"host_gib": GIB_OF_A_MIB})
        batch = ring.sequence_batch(make_batch(ROWS, seed=1))
        outputs = []
        for each in (one_rank(None), ring):
            with torch.no_grad(), attach(copy.deepcopy(model), each) as attachment:
                outputs.append(attachment.model(**batch).logits)
        torch.testing.assert_close(outputs[1], outputs[0])
        assert ring.spill is not None and ring.spill.store is None

    def test_generation_takes_the_layers_own_way(self) -> None:
        model = tiny_model().eval()
        ids = torch.arange(1, 10)[None]
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)
        attach(model, one_rank(2))
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)

    def test_detaching_gives_the_layers_back(self) -> None:
        model = tiny_model()
        with attach(model, one_rank(37)):
            assert [is_chunked(layer) for layer in model.model.layers] == [True, True]
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)


class Live(TorchDispatchMode):
    """Bytes of what was made within it: those alive now, and the most at once."""

    def __init__(self, of_interest: int = 0) -> None:
        super().__init__()
        self.most, self.largest, self._of_interest = 0, 0, of_interest
        self._storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in known:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
                if self._of_interest in x.shape:
                    self.largest = max(self.largest, x.numel())
        self.most = max(self.most, self.bytes())
        return out

    def bytes(self) -> int:
        self._storages = {key: ref for key, ref in self._storages.items() if not ref.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in self._storages.values())


WIDE: Any = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 600, "num_attention_heads": 4}
WHOLE = 64 * 4
"""Bytes of a token in a tensor of the whole shard such as a layer's input, q and o."""


def measured(
    chunk_tokens: int | None, layers: int = 1, tokens: int = 448, kv_heads: int = 2, **values: Any
) -> tuple[int, int, int]:
    """Bytes alive after the forward pass, most at once in the backward pass, and most numbers in a tensor of the MLP."""
    model = LlamaForCausalLM(LlamaConfig(**WIDE, num_hidden_layers=layers, num_key_value_heads=kv_heads))
    enable_tiled_loss(model, 8)
    ring = one_rank(chunk_tokens, "full", **values)
    attach(model, ring)
    if chunk_tokens is None:
        enable_gradient_checkpointing(model)
    batch = ring.sequence_batch(make_batch([Row((tokens,))], seed=1))
    with Live(of_interest=600) as live:
        loss = model(**batch, num_items_in_batch=100).loss
        gc.collect()
        after_forward, live.most = live.bytes(), 0
        loss.backward()
    return after_forward, live.most, live.largest


class TestMemory:
    def test_no_tensor_of_the_mlp_has_more_tokens_than_a_chunk(self) -> None:
        assert [measured(chunk_tokens)[2] for chunk_tokens in (None, 80)] == [448 * 600, 80 * 600]

    def test_a_layer_keeps_its_input_and_what_attention_keeps(self) -> None:
        one, three = (measured(37, layers)[0] for layers in (1, 3))
        lse = 4 * 4
        assert three - one == 2 * 448 * (2 * WHOLE + lse)

    def test_the_backward_pass_holds_few_tensors_of_the_whole_shard(self) -> None:
        short, long = (measured(16, tokens=tokens)[1] for tokens in (448, 896))
        held = (long - short) / 448 / WHOLE
        # x, dy, dx, q, k and v, o, do; and what attention makes: dq (in the kernel once more), k and v in a row and their
        # gradients; cos and sin, lse and the like
        assert held < 7 + 4 + 1, f"{held:.2f} tensors"
        assert held > 10, "the meter has seen them"

    def test_pages_take_keys_values_and_their_gradients_in_the_ring_from_the_device(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch_reference, "TILE_ELEMENTS", 1)  # little but whole tensors; the C++ kernel copies parts of q
        held = []
        for page_tokens in (None, 64):
            values: dict[str, Any] = {
                "backend": "torch",
                "offload": {"host_gib": 4 * GIB_OF_A_MIB, "kv_page_tokens": page_tokens},
            }
            short, long = (measured(16, tokens=tokens, **values)[1] for tokens in (256, 512))
            held.append((long - short) / 256 / WHOLE)
        # k and v, once more in a row, and their gradients in float32
        assert held[1] < held[0] - 3, f"{held[0]:.2f} tensors without pages, {held[1]:.2f} with pages"

    def test_what_a_layer_keeps_goes_with_its_backward_pass_and_not_with_the_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[weakref.ref[Any]] = []
        init = slots.Slot.__init__

        def watched(slot: Any) -> None:
            init(slot)
            made.append(weakref.ref(slot))

        monkeypatch.setattr(slots.Slot, "__init__", watched)
        loss = loss_of(tiny_model(), one_rank(37))
        assert len(made) == 2 and all(ref() is not None for ref in made)
        loss.backward()
        assert all(ref() is None for ref in made)

    def test_cosines_and_parameters_stay_where_they_are(self) -> None:
        ring = one_rank(37, offload={"host_gib": 4 * GIB_OF_A_MIB})
        model = tiny_model()
        loss_of(model, ring).backward()
        assert ring.spill is not None and ring.spill.store is not None
        assert ring.spill.store.numbers().to_device == 2 * 3, "of each of two layers its input, o and lse"


class TestRefusals:
    def test_layers_that_are_not_known(self) -> None:
        model = GemmaForCausalLM(GemmaConfig(**WIDE, num_hidden_layers=1, head_dim=16))
        with pytest.raises(SparseRingError, match="GemmaDecoderLayer may do more .* leave layer_chunk_tokens out"):
            enable_chunked_layers(model, 8)
        with pytest.raises(SparseRingError, match="no decoder layers"):
            enable_chunked_layers(nn.Linear(2, 2), 8)

    def test_layers_that_were_changed_and_the_model_is_as_it_was(self) -> None:
        model: Any = tiny_model()
        before = model.config._attn_implementation
        model.model.layers[1].self_attn.o_norm = nn.LayerNorm(32)
        with pytest.raises(SparseRingError, match="its o_norm is not known here"):
            attach(model, one_rank(8))
        assert model.config._attn_implementation == before and not model.model._forward_pre_hooks
        del model.model.layers[1].self_attn.o_norm
        model.model.layers[1].forward = lambda *_, **__: None
        with pytest.raises(SparseRingError, match="another library"):
            attach(model, one_rank(8))
        assert not is_chunked(model.model.layers[0])

    def test_adapters_that_drop_out(self) -> None:
        with pytest.raises(SparseRingError, match=r"self_attn.q_proj.lora_dropout drops out .* lora_dropout=0.0"):
            loss_of(adapted_model(dropout=0.1), one_rank(37))

    def test_arguments_that_attention_does_not_know(self) -> None:
        ring, model = one_rank(37), tiny_model()
        attach(model, ring)
        with pytest.raises(SparseRingError, match="output_attentions"):
            model.model.layers[0](
                torch.zeros(1, TOKENS, 32),
                sparse_ring=ring.bind(ring.sequence_batch(make_batch(ROWS, seed=1))["sparse_ring"]),
                position_embeddings=(torch.zeros(1, TOKENS, 8), torch.zeros(1, TOKENS, 8)),
                output_attentions=True,
            )


class TestUnderZero(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("zero", ["zero0", "zero1", "zero2_reduce_scatter", "zero3_reduce_scatter", "zero3_all_reduce"])
    def test_gradients_equal_those_of_one_process(self, zero: str) -> None:
        check_against_one_process(Run(ZERO[zero], "price", rows=[PADDED], layer_chunk_tokens=50))

    @pytest.mark.parametrize("zero", ["zero2_reduce_scatter", "zero3_reduce_scatter"])
    def test_with_accumulation_and_offload(self, zero: str) -> None:
        offload = {"host_gib": GIB_OF_A_MIB}
        check_against_one_process(Run(ZERO[zero], "full", degree=1, accumulation=2, layer_chunk_tokens=50, offload=offload))

    @pytest.mark.world_size(4)
    def test_on_rings_between_ulysses_groups_with_offload(self) -> None:
        offload = {"host_gib": GIB_OF_A_MIB}
        plan: dict[str, Any] = {"ulysses_degree": 2, "layer_chunk_tokens": 50, "offload": offload}
        check_against_one_process(Run(ZERO["zero3_reduce_scatter"], "every_query", rows=[PADDED], **plan))

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize(
        ("ulysses", "kind", "offload"),
        [(4, "llama", None), (2, "llama of one KV head", {"host_gib": GIB_OF_A_MIB, "kv_page_tokens": 64})],
    )
    def test_in_a_ulysses_group_of_more_ranks_than_kv_heads(
        self, ulysses: int, kind: str, offload: dict[str, Any] | None
    ) -> None:
        plan: dict[str, Any] = {"ulysses_degree": ulysses, "heads_per_pattern": 1, "layer_chunk_tokens": 40, "offload": offload}
        check_against_one_process(Run(ZERO["zero2_reduce_scatter"], "price", kind=kind, rows=[PADDED], **plan))

    @pytest.mark.slow
    def test_ranks_that_share_a_kv_head_hold_no_more_than_those_with_one_each(self) -> None:
        if dist.get_backend() == "nccl":
            pytest.skip("counted on the CPU")
        shards = [(kv_heads, tokens) for kv_heads in (2, 1) for tokens in (512, 1024)]
        most = [measured(16, tokens=tokens, kv_heads=kv, degree=2, ulysses_degree=2)[1] for kv, tokens in shards]
        own, shared = most[1] - most[0], most[3] - most[2]
        assert shared == pytest.approx(own, rel=0.01), "exchanged at once, q, k, v, o and gradients would be there twice"

    def test_zero3_gathers_a_layer_once_per_pass(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        fetched: list[str] = []
        fetch = PartitionedParameterCoordinator.fetch_sub_module

        def watched(self: Any, module: nn.Module, forward: bool) -> None:
            fetched.append(type(module).__name__)
            fetch(self, module, forward)

        run = Run(ZERO["zero3_reduce_scatter"], "price", rows=[PACKED], layer_chunk_tokens=20)
        PartitionedParameterCoordinator.fetch_sub_module = watched
        try:
            run.step()
        finally:
            PartitionedParameterCoordinator.fetch_sub_module = fetch
        assert fetched.count("LlamaDecoderLayer") == 2 * 2
        assert not {"LlamaMLP", "LlamaAttention"} & set(fetched)

    def test_an_engine_that_gathers_module_by_module_is_refused(self) -> None:
        run = Run(ZERO["zero3_reduce_scatter"], "price", rows=[PACKED])
        with pytest.raises(SparseRingError, match=r"before deepspeed.initialize"):
            enable_chunked_layers(run.engine, 20)

    def test_trainer_takes_it_from_the_file(self, tmp_path: Path) -> None:
        rows = make_rows([150, 201, 64, 97])
        config = ds_config(3, layer_chunk_tokens=30, offload={"host_gib": GIB_OF_A_MIB})
        trainer, recorder = make_trainer(arguments(tmp_path, config, max_steps=3), rows)
        trainer.train()
        assert all(is_chunked(layer) for layer in trainer.model.model.layers)
        if dist.get_rank() == 0:
            expected = list(plain_training(rows, 3, 1))
            assert recorder.of("loss") == pytest.approx([loss for loss, _, _ in expected], rel=1e-4)
            assert recorder.of("grad_norm") == pytest.approx([norm for _, norm, _ in expected], rel=1e-3)


def test_the_set_up_says_how_layers_work() -> None:
    ring = one_rank(4096, offload={"host_gib": 2.0})
    setup = Setup(ring, zero_stage=3, micro_batch=1, accumulation=1, dtype="float32", gradient_checkpointing=False)
    text = dict(setup.rows())["gradient checkpointing"]
    assert "in chunks of 4096 tokens; index" in text and "up to 2 GiB" in text
    fewer = replace(setup, ring=one_rank(4096, layer_inputs_every=3))
    assert "in chunks of 4096 tokens, an input kept of 3 in a row; index" in dict(fewer.rows())["gradient checkpointing"]
    pages = one_rank(None, offload={"host_gib": 2.0, "kv_page_tokens": 65536})  # of use without checkpointing, too
    setup = Setup(pages, zero_stage=3, micro_batch=1, accumulation=1, dtype="float32", gradient_checkpointing=False)
    assert "in pages of 65536 tokens" in dict(setup.rows())["keys and values"]
