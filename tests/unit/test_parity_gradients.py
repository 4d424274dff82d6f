"""Gradients of the whole model on many ranks equal those of one process, for every ZeRO stage."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.integrations.deepspeed import check_engine, full_state_dict, initialize, loss_scale
from ds_sparse_ring.integrations.transformers import enable_gradient_checkpointing
from ds_sparse_ring.runtime import SparseRing
from tests.common import DistributedTest, rank_device
from tests.unit.parity_model import MODELS, Row, make_batch, on_rank, reference, section, single_ring, tiny_model
from tests.unit.trainer_runs import arguments, ds_config, make_rows, make_trainer

LEARNING_RATE = 0.5
# fp32 sums in another order: several times the error of a single product, far below any factor of the ranks.
TOLERANCE = 2e-4

ZERO: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2_reduce_scatter": {"stage": 2, "reduce_scatter": True},
    "zero2_all_reduce": {"stage": 2, "reduce_scatter": False},
    "zero3_reduce_scatter": {"stage": 3, "reduce_scatter": True, "stage3_param_persistence_threshold": 0},
    "zero3_all_reduce": {"stage": 3, "reduce_scatter": False, "stage3_param_persistence_threshold": 0},
}
NOT_THE_DEFAULT = ["zero0", "zero1", "zero2_all_reduce", "zero3_all_reduce"]
"""What three and four ranks run by `make test-slow` only; one and two run all."""

# Documents of 1 and 7 tokens, over a block and shorter than it; left and right padding; lengths that no rank count
# divides.
PADDED = [Row((201,), left=20), Row((64, 7, 1, 70), right=30)]
PACKED = [Row((130, 157, 3))]
# Only the first block has targets: on every layout some rank has none.
ONE_RANK_WITHOUT = [Row((290,), labelled=0.1)]


class Run:
    """An engine on a ring, and the micro-batches that all data ranks see in one step."""

    def __init__(
        self,
        zero: dict[str, Any],
        selector: str,
        *,
        degree: int | None = None,
        accumulation: int = 1,
        checkpointing: bool = False,
        kind: str = "llama",
        rows: list[list[Row]] | None = None,
        clip: float = 0.0,
        **ring_values: Any,
    ) -> None:
        self.kind, self.selector, self.ring_values = kind, selector, ring_values
        self.ring = SparseRing(SparseRingConfig(**section(selector, degree=degree, **ring_values)))
        self.ring.meter.active = False
        model = tiny_model(kind)
        if checkpointing:
            enable_gradient_checkpointing(model)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.engine, *_ = initialize(model, config, ring=self.ring, optimizer=optimizer)
        kinds = rows or [PADDED, PACKED, ONE_RANK_WITHOUT]
        micro_batches = accumulation * self.ring.axes.data_size
        self.batches = [(kinds[i % len(kinds)], 10 + i) for i in range(micro_batches)]

    def own_batches(self) -> list[dict[str, Any]]:
        """This rank's parts of its data rank's micro-batches."""
        own = self.batches[self.ring.axes.data_rank :: self.ring.axes.data_size]
        return [on_rank(self.ring.sequence_batch(make_batch(rows, seed))) for rows, seed in own]

    def step(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one optimizer step (every rank has all of them)."""
        batches = self.own_batches()
        scale = loss_scale(self.ring, self.ring.count_targets(batches))
        total = torch.zeros((), device=rank_device())
        gradients: dict[str, torch.Tensor] = {}
        for i, batch in enumerate(batches):
            loss = self.engine(**batch, num_items_in_batch=1).loss * scale
            self.engine.backward(loss, scale_wrt_gas=False)
            total += loss.detach()
            if i == len(batches) - 1:
                parameters = self.engine.module.named_parameters()
                gradients = {name: safe_get_full_grad(p).detach().clone() for name, p in parameters}
            self.engine.step()
        return float(self.ring.axes.world_sum(total)) / self.ring.axes.world_size, gradients

    def reference_ring(self) -> SparseRing | None:
        """For a sparse index, the ring of one rank that chooses it. Every rank calls this."""
        of_this_run = ("ulysses_degree", "inner_degree", "inner", "layer_chunk_tokens", "layer_inputs_every", "offload")
        values = {key: x for key, x in self.ring_values.items() if key not in of_this_run}
        return None if self.selector == "full" else single_ring(self.selector, **values)


def check_against_one_process(run: Run, clip: float = 0.0) -> None:
    """Loss, every gradient, the norm and, after the step, every parameter."""
    reference_ring = run.reference_ring()
    loss, gradients = run.step()
    norm = run.engine.get_global_grad_norm()
    state = full_state_dict(run.engine)
    if dist.get_rank() != 0:
        return
    expected = reference(run.kind, run.batches, reference_ring)
    assert loss == pytest.approx(expected.loss, rel=1e-5)
    assert set(gradients) == set(expected.gradients)
    for name, gradient in gradients.items():
        close(gradient, expected.gradients[name], name)
    own_norm = float(torch.stack([g.double().norm() for g in gradients.values()]).norm())
    assert own_norm == pytest.approx(expected.norm, rel=TOLERANCE)
    if norm is not None:  # DeepSpeed has no norm for stage 0 in fp32
        assert float(norm) == pytest.approx(expected.norm, rel=TOLERANCE)
    factor = min(1.0, clip / expected.norm) if clip else 1.0
    before = tiny_model(run.kind).state_dict()
    for name, gradient in expected.gradients.items():
        close(state[name] - before[name], -LEARNING_RATE * factor * gradient, f"update of {name}", TOLERANCE * 5)


def close(actual: torch.Tensor, expected: torch.Tensor, name: str, tolerance: float = TOLERANCE) -> None:
    """The largest difference stays below ``tolerance`` of the largest entry."""
    actual, expected = actual.cpu(), expected.cpu()
    error = float((actual.double() - expected.double()).abs().max())
    scale = float(expected.double().abs().max())
    assert error <= tolerance * scale, f"{name}: off by {error:.3g}, largest entry {scale:.3g}"


def degree_for(accumulation: int) -> int | None:
    """Worlds of 2 and 4 are one ring for one accumulation step, and 2 data ranks for two."""
    world = dist.get_world_size()
    return world // 2 if world % 2 == 0 and accumulation == 2 else None


class TestGradientsEqualOneProcess(DistributedTest):
    world_size = [1, 2, 3, 4]

    @pytest.mark.parametrize("zero", ZERO)
    @pytest.mark.slow(world_size=[3])
    @pytest.mark.slow(world_size=[4], zero=NOT_THE_DEFAULT)
    def test_full_index_with_accumulation(self, zero: str) -> None:
        self.check(zero, "full", accumulation=2, checkpointing=zero.startswith("zero3"))

    @pytest.mark.parametrize("zero", ZERO)
    @pytest.mark.slow(world_size=[3, 4], zero=NOT_THE_DEFAULT)
    def test_sparse_index(self, zero: str) -> None:
        selector = "every_query" if zero in ("zero1", "zero3_reduce_scatter") else "price"
        self.check(zero, selector, accumulation=1, checkpointing=not zero.startswith("zero3"))

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("zero", ZERO)
    def test_full_index(self, zero: str) -> None:
        self.check(zero, "full", accumulation=1, checkpointing=False)

    @pytest.mark.world_size([2, 4])
    @pytest.mark.parametrize("zero", ZERO)
    @pytest.mark.slow(world_size=[4], zero=NOT_THE_DEFAULT)
    def test_sparse_index_with_accumulation(self, zero: str) -> None:
        self.check(zero, "price", accumulation=2, checkpointing=True)

    def check(self, zero: str, selector: str, accumulation: int, checkpointing: bool) -> None:
        degree = degree_for(accumulation)
        run = Run(ZERO[zero], selector, degree=degree, accumulation=accumulation, checkpointing=checkpointing)
        check_against_one_process(run)


class TestEveryPlanGivesTheGradientsOfOneProcess(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize(("zero", "selector"), [("zero2_reduce_scatter", "price"), ("zero3_reduce_scatter", "every_query")])
    @pytest.mark.parametrize(
        "plan",
        [
            {"ulysses_degree": 2},
            {"ulysses_degree": 4, "heads_per_pattern": 1},  # of a KV head's two a rank has one
            {"inner_degree": 2},
            {"inner_degree": 2, "inner": "gather"},
        ],
    )
    def test_sparse_index_with_checkpointing(self, plan: dict[str, Any], zero: str, selector: str) -> None:
        check_against_one_process(Run(ZERO[zero], selector, checkpointing=True, rows=[PADDED], **plan))

    @pytest.mark.parametrize("zero", ["zero2_reduce_scatter", "zero3_reduce_scatter"])
    def test_keys_and_values_in_host_memory_with_accumulation(self, zero: str) -> None:
        offload = {"host_gib": 1 / 1024, "kv_page_tokens": 64}
        plan: dict[str, Any] = {"degree": 2} if zero.startswith("zero2") else {"ulysses_degree": 2}
        accumulation = 2 if zero.startswith("zero2") else 1
        rows = None if zero.startswith("zero2") else [PADDED]
        selector = "price" if zero.startswith("zero2") else "every_query"
        run = Run(ZERO[zero], selector, checkpointing=True, accumulation=accumulation, rows=rows, offload=offload, **plan)
        check_against_one_process(run)
        assert run.ring.spill is not None and run.ring.spill.store is not None

    @pytest.mark.world_size([5, 8])
    @pytest.mark.slow
    def test_five_ranks_and_eight(self) -> None:
        plans: dict[int, dict[str, Any]] = {5: {"inner_degree": 5}, 8: {"ulysses_degree": 2, "inner_degree": 2}}
        plan = plans[dist.get_world_size()]
        check_against_one_process(Run(ZERO["zero3_reduce_scatter"], "price", rows=[PADDED], inner="gather", **plan))


class TestWhatElseMustNotChangeGradients(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("layout", ["striped", "contiguous", "zigzag"])
    @pytest.mark.parametrize("zero", ["zero2_reduce_scatter", "zero3_reduce_scatter", "zero3_all_reduce"])
    def test_a_rank_without_any_target_contributes_an_exact_zero(self, zero: str, layout: str) -> None:
        run = Run(ZERO[zero], "full", rows=[ONE_RANK_WITHOUT], layout=layout)
        (batch,) = run.own_batches()
        counts = [torch.zeros((), dtype=torch.int64, device=rank_device()) for _ in range(2)]
        dist.all_gather(counts, (batch["shift_labels"] != -100).sum())
        assert sorted(int(count) > 0 for count in counts) == [False, True]
        check_against_one_process(run)

    @pytest.mark.parametrize("kind", MODELS)
    @pytest.mark.parametrize("selector", ["full", "price"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    @pytest.mark.slow(selector=["full"], checkpointing=[False])
    def test_each_architecture_under_zero3(self, kind: str, selector: str, checkpointing: bool) -> None:
        run = Run(ZERO["zero3_reduce_scatter"], selector, kind=kind, checkpointing=checkpointing, rows=[PACKED])
        check_against_one_process(run)

    @pytest.mark.parametrize("zero", ZERO)
    def test_clipping_is_that_of_one_process(self, zero: str) -> None:
        check_against_one_process(Run(ZERO[zero], "full", clip=0.05, rows=[PACKED]), clip=0.05)

    def test_checkpointing_that_keeps_only_the_index(self) -> None:
        run = Run(ZERO["zero3_reduce_scatter"], "every_query", checkpointing=True, rows=[PADDED], checkpoint="index")
        check_against_one_process(run)

    def test_heads_that_share_a_pattern(self) -> None:
        check_against_one_process(Run(ZERO["zero2_all_reduce"], "price", rows=[PADDED], heads_per_pattern=2))

    def test_without_any_target_loss_and_gradients_are_zero(self) -> None:
        run = Run(ZERO["zero3_reduce_scatter"], "full", rows=[[Row((100,), labelled=0.0)]])
        loss, gradients = run.step()
        assert loss == 0
        assert all(bool((gradient == 0).all()) for gradient in gradients.values())

    @pytest.mark.parametrize("chunk_tokens", [None, 50])
    def test_frozen_parameters_under_zero3_with_checkpointing(self, chunk_tokens: int | None) -> None:
        model = tiny_model()
        trained = [p for name, p in model.named_parameters() if "v_proj" in name]
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
        enable_gradient_checkpointing(model)
        ring = SparseRing(SparseRingConfig(**section("price", layer_chunk_tokens=chunk_tokens)))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": ZERO["zero3_reduce_scatter"],
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = initialize(model, config, ring=ring, optimizer=torch.optim.SGD(trained, lr=LEARNING_RATE))
        batch = on_rank(ring.sequence_batch(make_batch(PACKED, 10)))
        engine.backward(engine(**batch, num_items_in_batch=ring.count_targets([batch])).loss * 2, scale_wrt_gas=False)
        expected = reference("llama", [(PACKED, 10)], single_ring("price"))
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                close(safe_get_full_grad(parameter), expected.gradients[name], name)


class TestRefusals(DistributedTest):
    world_size = 2

    def test_an_mpu_is_refused(self) -> None:
        with pytest.raises(ValueError, match="degree"):
            initialize(tiny_model(), {"train_micro_batch_size_per_gpu": 1, "sparse_ring": {}}, mpu=object())

    def test_parameters_added_after_zero3_are_refused(self) -> None:
        run = Run(ZERO["zero3_reduce_scatter"], "full")
        run.engine.module.register_parameter("late", torch.nn.Parameter(torch.zeros(1)))
        with pytest.raises(ValueError, match="does not partition late"):
            check_engine(run.engine, run.ring)


class TestOrderOfCalls(DistributedTest):
    """ZeRO-3 divides a model while it is made, if it is in force by then: as the README has it, and not as in many tutorials."""

    world_size = 2

    def test_a_model_made_before_zero3_is_in_force_is_warned_of(self, tmp_path: Path) -> None:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": ZERO["zero3_reduce_scatter"],
            "zero_allow_untested_optimizer": True,
            "sparse_ring": section(),
        }
        if dist.get_rank() == 0:
            tiny_model().save_pretrained(tmp_path / "model")
        dist.barrier()
        deepspeed.init_distributed()

        def warnings_of(model: Any) -> tuple[list[str], Any]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine, *_ = initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
            return [str(w.message) for w in caught if "ZeRO-3" in str(w.message)], engine

        early = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        count = sum(parameter.numel() for parameter in early.parameters())
        found, engine = warnings_of(early)
        assert len(found) == (dist.get_rank() == 0)
        assert all(f"each rank holds all of it, {count} parameters" in text and "HfDeepSpeedConfig" in text for text in found)
        assert all(hasattr(parameter, "ds_id") for parameter in engine.module.parameters()), "DeepSpeed divides it late"
        in_force = HfDeepSpeedConfig(config)
        late = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert in_force and all(parameter.numel() == 0 for parameter in late.parameters()), "never whole"
        assert warnings_of(late)[0] == []

    def test_trainer_warns_too(self, tmp_path: Path) -> None:
        early = tiny_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(arguments(tmp_path, ds_config(3)), make_rows([50]), early)
        assert sum("before ZeRO-3 was in force" in str(w.message) for w in caught) == (dist.get_rank() == 0)
