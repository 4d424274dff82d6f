"""Of a few layers in a row only the first keeps its input: the same bits, fewer bytes, and nothing chosen twice."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from ds_sparse_ring import attention
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations import kept_inputs
from ds_sparse_ring.integrations.deepspeed import initialize
from ds_sparse_ring.integrations.transformers import enable_gradient_checkpointing
from ds_sparse_ring.runtime import SparseRing
from tests.common import DistributedTest
from tests.offloading import GIB_OF_A_MIB
from tests.unit.parity_model import Row, make_batch, on_rank, section, tiny_model
from tests.unit.test_chunked_layers import WHOLE, adapted_model, assert_same, loss_of, measured, one_rank, trained
from tests.unit.test_parity_gradients import PADDED, ZERO, Run, check_against_one_process

FIVE = "llama of 5 layers"
HOST: dict[str, Any] = {"host_gib": 2 * GIB_OF_A_MIB}
PAGES = {**HOST, "kv_page_tokens": 128}
SOME = {"host_gib": 840 / 1024 * GIB_OF_A_MIB}
"""Room for the inputs, and for outputs of the last layers."""


def assert_equal(got: tuple[Any, dict[str, Any]], expected: tuple[Any, dict[str, Any]]) -> None:
    assert torch.equal(got[0], expected[0])
    for name, gradient in expected[1].items():
        assert (gradient is None) == (got[1][name] is None), name
        assert gradient is None or torch.equal(got[1][name], gradient), name


class TestOnOneRank:
    @pytest.mark.parametrize(
        ("offload", "keep"), [(None, "output"), (HOST, "index"), (SOME, "output"), (PAGES, "output"), (PAGES, "index")]
    )
    def test_the_bits_are_those_of_layers_that_keep_their_inputs(self, offload: dict[str, Any] | None, keep: str) -> None:
        model = tiny_model(FIVE).double()
        values: dict[str, Any] = {"offload": offload, "checkpoint": keep}
        expected = trained(copy.deepcopy(model), one_rank(37, **values))
        for every in (2, 3):
            assert_equal(trained(copy.deepcopy(model), one_rank(37, **values, layer_inputs_every=every)), expected)

    def test_gradients_are_those_of_whole_layers(self) -> None:
        model = tiny_model(FIVE).double()
        expected = trained(copy.deepcopy(model), one_rank(None))
        assert_same(trained(model, one_rank(37, layer_inputs_every=2)), expected, 1e-12)

    @pytest.mark.parametrize("first_trained", [0, 1, 3])
    def test_with_frozen_layers_before_the_first_one_that_is_trained(self, first_trained: int) -> None:
        model: Any = tiny_model(FIVE).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" in name and int(name.split(".")[2]) >= first_trained)
        expected = trained(copy.deepcopy(model), one_rank(37))
        assert_equal(trained(model, one_rank(37, layer_inputs_every=3)), expected)

    def test_with_adapters(self) -> None:
        model = adapted_model()
        expected = trained(copy.deepcopy(model), one_rank(37))
        assert_equal(trained(model, one_rank(37, layer_inputs_every=2)), expected)

    def test_under_autocast(self) -> None:
        model, results = tiny_model(FIVE), []
        for every in (1, 2):
            copied = copy.deepcopy(model)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(copied, one_rank(37, layer_inputs_every=every))
            loss.backward()
            results.append((loss.detach(), {name: p.grad for name, p in copied.named_parameters()}))
        assert_equal(results[1], results[0])

    def test_in_a_second_pass_over_a_graph_that_is_kept(self) -> None:
        model = tiny_model(FIVE).double()
        expected = trained(copy.deepcopy(model), one_rank(37))
        loss = loss_of(model, one_rank(37, layer_inputs_every=3, offload=HOST))
        loss.backward(retain_graph=True)
        loss.backward()
        assert_same((loss.detach(), {name: p.grad / 2 for name, p in model.named_parameters()}), expected, 1e-12)  # type: ignore[operator]

    @pytest.mark.parametrize(("keep", "attended"), [("output", 5), ("index", 5 + 5 + 2)])
    def test_nothing_is_chosen_again_and_kept_outputs_are_not_attended_to_again(
        self, keep: str, attended: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = {"_select": 0, "ring_forward": 0}
        for name in counts:
            of_name = getattr(attention, name)

            def counted(*args: Any, of_name: Any = of_name, name: str = name) -> Any:
                counts[name] += 1
                return of_name(*args)

            monkeypatch.setattr(attention, name, counted)
        trained(tiny_model(FIVE), one_rank(37, layer_inputs_every=2, checkpoint=keep))
        assert counts == {"_select": 5, "ring_forward": attended}, "of layers 0, 1 | 2, 3 | 4 the first of a pair once more"


class TestMemory:
    def test_one_input_of_a_group_is_kept(self) -> None:
        kept = [measured(80, 5, layer_inputs_every=every)[0] for every in (1, 2, 3)]
        assert [kept[0] - each for each in kept] == [0, 2 * 448 * WHOLE, 3 * 448 * WHOLE]

    def test_the_backward_pass_holds_the_other_inputs_of_one_group(self) -> None:
        held = [measured(80, 6, layer_inputs_every=every, offload={"host_gib": 16 * GIB_OF_A_MIB})[1] for every in (1, 3)]
        assert held[1] - held[0] < 2.1 * 448 * WHOLE, "of three, two at most wait"

    def test_inputs_and_slots_go_with_the_layers_and_not_with_the_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[weakref.ref[Any]] = []
        alive: list[int] = []
        of_kept = kept_inputs.KeptInput.take

        def watched(kept: Any) -> Any:
            alive.append(sum(ref() is not None for ref in made))
            return of_kept(kept)

        monkeypatch.setattr(kept_inputs.KeptInput, "take", watched)
        init = kept_inputs.KeptInput.__init__

        def noted(kept: Any, *args: Any) -> None:
            init(kept, *args)
            made.append(weakref.ref(kept))

        monkeypatch.setattr(kept_inputs.KeptInput, "__init__", noted)
        ring = one_rank(37, layer_inputs_every=3, offload=HOST)
        loss = loss_of(tiny_model(FIVE), ring)
        loss.backward()
        assert alive == [5, 4, 3, 2, 1] and not any(ref() is not None for ref in made)
        assert ring.spill is not None and ring.spill.opened.room("host") == 2 * 2**20

    def test_a_pass_without_backward_leaves_nothing(self) -> None:
        ring = one_rank(37, layer_inputs_every=3, offload=HOST)
        model: Any = tiny_model(FIVE).double()
        expected = trained(copy.deepcopy(model), one_rank(37))
        loss = loss_of(model, ring)
        del loss
        hook = model.model.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, ring)
        hook.remove()
        with torch.no_grad():
            loss_of(model.eval(), ring)
        gc.collect()
        assert ring.spill is not None and ring.spill.opened.room("host") == 2 * 2**20
        assert_equal(trained(model.train(), ring), expected)


class TestRefusals:
    def test_a_hook_that_changes_what_passes_between_layers(self) -> None:
        model: Any = tiny_model(FIVE)
        model.model.layers[3].register_forward_hook(lambda _, __, y: 2 * y)
        loss_of(copy.deepcopy(model), one_rank(37, layer_inputs_every=4))
        with pytest.raises(SparseRingError, match=r"layer_inputs_every = 5: the input of layer 4 is .*remove the hook"):
            loss_of(model, one_rank(37, layer_inputs_every=5))

    @pytest.mark.parametrize(
        ("option", "way_out"), [({"every_n_layers": 2}, "layer_inputs_every"), ({"offload": True}, "offload.host_gib")]
    )
    @pytest.mark.parametrize("values", [{"layer_chunk_tokens": 37}, {"offload": HOST}])
    def test_options_of_transformers_beside_the_section(
        self, option: dict[str, Any], way_out: str, values: dict[str, Any]
    ) -> None:
        model = tiny_model()
        enable_gradient_checkpointing(model, **option)
        ring = SparseRing(SparseRingConfig(**section("price", degree=1, **values)))
        with pytest.raises(SparseRingError, match=f"{next(iter(option))} .*leave it out.* sparse_ring.{way_out}"):
            loss_of(model, ring)


def steps(every: int, zero: str, trained_part: str = "", **values: Any) -> list[torch.Tensor]:
    """Losses of some steps."""
    ring = SparseRing(SparseRingConfig(**section("every_query", layer_chunk_tokens=50, layer_inputs_every=every, **values)))
    model = tiny_model(FIVE)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained_part in name)
    enable_gradient_checkpointing(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {**ZERO[zero], "stage3_prefetch_bucket_size": 4000, "stage3_max_reuse_distance": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = initialize(model, config, ring=ring, optimizer=optimizer)
    seen = []
    for step in range(3):
        batch = on_rank(ring.sequence_batch(make_batch([Row((290,)) if step % 2 else Row((130, 157, 3))], seed=step)))
        loss = engine(**batch, num_items_in_batch=ring.count_targets([batch])).loss
        engine.backward(loss)
        layers = [p for name, p in engine.module.named_parameters() if ".layers." in name]
        assert not any(p.ds_status.name == "AVAILABLE" or p.ds_active_sub_modules for p in layers if hasattr(p, "ds_status"))
        engine.step()
        seen.append(loss.detach().cpu())
    return seen


class TestUnderZero(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("zero", "every", "keep"),
        [
            ("zero0", 2, "output"),
            ("zero1", 3, "index"),
            ("zero2_reduce_scatter", 2, "index"),
            ("zero3_reduce_scatter", 2, "output"),
            ("zero3_all_reduce", 3, "index"),
        ],
    )
    def test_gradients_equal_those_of_one_process(self, zero: str, every: int, keep: str) -> None:
        values: dict[str, Any] = {"layer_chunk_tokens": 50, "layer_inputs_every": every, "checkpoint": keep, "offload": HOST}
        check_against_one_process(Run(ZERO[zero], "price", kind=FIVE, rows=[PADDED], **values))

    @pytest.mark.world_size(4)
    def test_on_rings_between_ulysses_groups_with_offload(self) -> None:
        plan: dict[str, Any] = {"ulysses_degree": 2, "layer_chunk_tokens": 50, "layer_inputs_every": 3, "offload": HOST}
        check_against_one_process(Run(ZERO["zero3_reduce_scatter"], "every_query", kind=FIVE, rows=[PADDED], **plan))

    @pytest.mark.parametrize(
        ("zero", "part", "every"),
        [("zero2_reduce_scatter", "", 3), ("zero3_reduce_scatter", "", 2), ("zero3_reduce_scatter", "v_proj", 3)],
    )
    @pytest.mark.slow(part=["v_proj"])
    def test_steps_give_the_same_bits_and_zero3_lets_go_of_all_parameters(self, zero: str, part: str, every: int) -> None:
        """From the second step on ZeRO-3 fetches ahead, in the order of the first."""
        expected = steps(1, zero, part)
        assert all(torch.equal(a, b) for a, b in zip(steps(every, zero, part, offload=HOST), expected, strict=True))

    def test_zero3_gathers_a_layer_for_each_of_its_passes_and_lets_go_after_each(self) -> None:
        seen: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("fetch_sub_module", "release_sub_module"):
                of_name = getattr(PartitionedParameterCoordinator, name)

                def watched(self: Any, module: Any, forward: bool, of_name: Any = of_name, sign: str = name[0]) -> None:
                    if isinstance(module, LlamaDecoderLayer):
                        seen.append(f"{sign}{module.self_attn.layer_idx}{'' if forward else 'b'}")
                    of_name(self, module, forward=forward)

                patch.setattr(PartitionedParameterCoordinator, name, watched)
            steps(2, "zero3_reduce_scatter")
        forward = [f"{sign}{layer}" for layer in range(5) for sign in "fr"]
        backward = ["f4b", "r4b", "f3b", "f2", "r2", "r3b", "f2b", "r2b", "f1b", "f0", "r0", "r1b", "f0b", "r0b"]
        assert seen == 3 * [*forward, *backward]
