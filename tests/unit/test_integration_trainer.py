"""The Transformers Trainer on a ring: losses, evaluation, prediction and resume are those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    TrainerCallback,
    default_data_collator,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds_sparse_ring.batch import causal_triangle
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations import flops, memory
from ds_sparse_ring.integrations.deepspeed import full_state_dict
from ds_sparse_ring.integrations.resume import StepShape
from ds_sparse_ring.integrations.trainer_data import Absent, BatchCollator, CompleteRows, CompleteStream
from ds_sparse_ring.plan_compare import job_of
from ds_sparse_ring.run_log import read_maps, read_run
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.slots import checkpoint_context_fn
from tests.common import DistributedTest, rank_device
from tests.unit.parity_model import CHECKPOINTING, VOCABULARY, section, tiny_model, word_tokenizer
from tests.unit.trainer_runs import arguments, ds_config, make_rows, make_trainer, plain_training, token_losses


class TestTrainingEqualsOneProcess(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.parametrize("stage", [2, 3])
    @pytest.mark.slow(world_size=[4], stage=[2])
    def test_losses_equal_plain_sdpa_over_20_steps(self, stage: int, tmp_path: Path) -> None:
        # world 2: one ring of 2; world 4: 2 data ranks x rings of 2, so that a step takes 2 x 2 rows
        config = ds_config(stage, degree=2)
        accumulation = 1 if dist.get_world_size() == 2 else 2
        rows_per_step = accumulation * dist.get_world_size() // 2
        steps = 20 if dist.get_world_size() == 2 else 6
        rows = make_rows([150, 201, 64, 97, 333, 128, 70, 260])
        args = arguments(
            tmp_path,
            config,
            max_steps=steps,
            gradient_accumulation_steps=accumulation,
            **{CHECKPOINTING: stage == 3},
        )
        trainer, recorder = make_trainer(args, rows)
        trainer.train()
        assert trainer.get_total_train_batch_size(args) == rows_per_step
        state = full_state_dict(trainer.deepspeed)
        if dist.get_rank() == 0:
            expected = list(plain_training(rows, steps, rows_per_step))
            assert recorder.of("loss") == pytest.approx([loss for loss, _, _ in expected], rel=1e-4)
            assert recorder.of("grad_norm") == pytest.approx([norm for _, norm, _ in expected], rel=1e-3)
            for name, parameter in expected[-1][2].state_dict().items():
                torch.testing.assert_close(state[name], parameter, rtol=1e-3, atol=1e-4)

    def test_evaluation_loss_and_predictions_equal_one_process(self, tmp_path: Path) -> None:
        lengths = [50, 150, 64, 97, 130, 128, 70]  # no multiple of the rows that all rings take at once
        rows, unlabelled = make_rows(lengths), make_rows(lengths, labels=False)
        degree = 1 if dist.get_world_size() == 2 else 2
        args = arguments(tmp_path, ds_config(degree=degree), max_steps=1, per_device_eval_batch_size=2)
        collator = DataCollatorForLanguageModeling(word_tokenizer(), mlm=False)  # pads the shorter row of each batch
        trainer, _ = make_trainer(args, unlabelled, eval_dataset=unlabelled, data_collator=collator)
        trainer.train()
        widths: list[int] = []
        hook = trainer.model.register_forward_pre_hook(
            lambda model, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        metrics = trainer.evaluate()
        hook.remove()
        assert max(widths) <= -(-5 // degree) * 64, "two rows take 5 blocks at most, and each rank gets its part"
        predicted: Any = trainer.predict(unlabelled)
        model = tiny_model().eval()
        state = [full_state_dict(trainer.deepspeed)]
        dist.broadcast_object_list(state)
        model.load_state_dict(state[0])
        with torch.no_grad():
            expected = float(token_losses(model, rows).mean())
            logits = [model(row["input_ids"][None]).logits[0] for row in rows]
        assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert predicted.metrics["test_loss"] == pytest.approx(expected, rel=1e-5)
        assert trainer.num_examples(trainer.get_eval_dataloader()) >= len(rows)
        assert predicted.predictions.shape == (len(rows), 150, VOCABULARY)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            np.testing.assert_allclose(predicted.predictions[i, :length], logits[i].numpy(), rtol=1e-3, atol=1e-4)
            assert predicted.label_ids[i, 0] == -100
            assert predicted.label_ids[i, 1:length].tolist() == row["labels"][1:].tolist()
            assert (predicted.label_ids[i, length:] == -100).all()


class TestWithoutDeepSpeed(DistributedTest):
    world_size = 2

    def test_plain_data_parallel_equals_one_process_too(self, tmp_path: Path) -> None:
        rows = make_rows([150, 201, 64])
        args = arguments(tmp_path, deepspeed=None, max_steps=3)
        _ = args.device
        trainer, recorder = make_trainer(args, rows, ring=SparseRing(SparseRingConfig(**section())))
        trainer.train()
        expected = list(plain_training(rows, 3, 1))
        assert recorder.of("loss") == pytest.approx([loss for loss, _, _ in expected], rel=1e-4)
        assert recorder.of("grad_norm") == pytest.approx([norm for _, norm, _ in expected], rel=1e-3)


class TestResume(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(("stage", "degree"), [(1, 2), (3, 2), (3, 1)])
    def test_three_steps_and_three_more_equal_six(self, stage: int, degree: int, tmp_path: Path) -> None:
        # 4 rows shuffled anew each epoch: the resumed run has to find its place in the second one, on two rings as on one
        values: dict[str, Any] = {
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 3,
            "lr_scheduler_type": "linear",
            "train_sampling_strategy": "random",
        }
        rows = make_rows([150, 201, 64, 97])
        selector = ("every_query" if stage == 1 else "price") if degree == 2 else "full"
        moving: dict[str, Any] = {"schedule": {"target_density": 0.65, "gain": 0.5}} if stage == 1 and degree == 2 else {}
        accumulation: dict[str, Any] = {"gradient_accumulation_steps": 2 // degree}
        config = ds_config(stage, selector=selector, **moving)
        trainer, whole = make_trainer(arguments(tmp_path, config, **accumulation, **values), rows)
        trainer.train()
        expected = full_state_dict(trainer.deepspeed)
        again = arguments(tmp_path, ds_config(stage, selector=selector, degree=degree, **moving), **values)
        trainer, resumed = make_trainer(again, rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        tolerance = 1e-6 if degree == 2 else 1e-4  # another ring sums up in another order
        assert resumed.of("loss") == pytest.approx(whole.of("loss")[3:], rel=tolerance)
        assert resumed.of("grad_norm") == pytest.approx(whole.of("grad_norm")[3:], rel=10 * tolerance)
        if selector != "full":
            assert resumed.of("price") == whole.of("price")[3:]
            assert (len(set(whole.of("price"))) > 3) == bool(moving)
        state = full_state_dict(trainer.deepspeed)
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=tolerance, atol=tolerance / 10)
        if dist.get_rank() == 0:
            converted = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "checkpoint-6"))
            for name in expected:
                torch.testing.assert_close(converted[name].to(state[name].device), state[name], rtol=0, atol=0)

    def test_a_checkpoint_of_other_steps_is_refused(self, tmp_path: Path) -> None:
        rows = make_rows([50, 60, 70, 80])
        trainer, _ = make_trainer(arguments(tmp_path, max_steps=1, save_strategy="steps", save_steps=1), rows)
        trainer.train()
        saved = tmp_path / "checkpoint-1"
        trainer, _ = make_trainer(arguments(tmp_path, ds_config(degree=1), max_steps=2), rows)
        with pytest.raises(
            SparseRingError, match="with 1 rows a step .2 ranks, 2 share a sequence.*here are 2 .2 ranks, 1 share one"
        ):
            trainer.train(resume_from_checkpoint=str(saved))
        dist.barrier()
        if dist.get_rank() == 0:
            StepShape(world=4, sequence_ranks=2, rows=2).save(saved)
        dist.barrier()
        with pytest.raises(SparseRingError, match="written by 4 ranks, here are 2.*states of 2.*copy them all"):
            trainer.train(resume_from_checkpoint=str(saved))

    def test_a_saved_model_loads_without_us(self, tmp_path: Path) -> None:
        rows = make_rows([150, 201])
        trainer, _ = make_trainer(arguments(tmp_path), rows, eval_dataset=rows)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(str(tmp_path / "model"))
        dist.barrier()
        unset_hf_deepspeed_config()  # as in another process; it would partition what is loaded here
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert model.config._attn_implementation == "sdpa"
        with torch.no_grad():
            assert float(token_losses(model, rows).mean()) == pytest.approx(loss, rel=1e-5)


class RankDependentRows(torch.utils.data.Dataset):
    """What must not happen: ranks of a ring see other rows."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_rows([100 + 64 * dist.get_rank()])[0]


class Endless(IterableDataset):
    """Rows that are made while they are read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


class EndsEarly(Endless):
    """A stream of which rank 1 sees less."""

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows[: len(self.rows) - 2 * dist.get_rank()]


class FewerRows(RankDependentRows):
    """A dataset of which rank 1 has less."""

    def __len__(self) -> int:
        return 4 - dist.get_rank()


class TestData(DistributedTest):
    world_size = 2

    def test_a_stream_that_ends_early_on_one_rank_ends_for_all(self, tmp_path: Path) -> None:
        rows = make_rows([70, 80, 64, 97, 90, 30])
        trainer, recorder = make_trainer(arguments(tmp_path, ds_config(2, degree=1), max_steps=3), EndsEarly(rows))
        with pytest.warns(UserWarning, match="ended on rank 1 before others"):
            trainer.train()
        expected = [loss for loss, _, _ in plain_training(rows[:4], 3, 2)]
        assert recorder.of("loss") == pytest.approx(expected, rel=1e-4)
        trainer, _ = make_trainer(arguments(tmp_path), FewerRows())
        with pytest.raises(SparseRingError, match="has 3 rows on rank 1 and 4 on rank 0"):
            trainer.train()

    def test_ranks_of_a_ring_that_drew_different_batches_are_stopped(self, tmp_path: Path) -> None:
        trainer, _ = make_trainer(arguments(tmp_path), RankDependentRows())
        with pytest.raises(SparseRingError, match="drew different batches"):
            trainer.train()

    @pytest.mark.parametrize(
        ("kind", "degree"),
        [(kind, degree) for kind in ("map", "arrow", "iterable", "arrow_iterable") for degree in (1, 2)] + [("workers", 1)],
    )
    @pytest.mark.slow(kind=["arrow", "arrow_iterable"], degree=[2])
    def test_every_kind_of_dataset_is_read_along_the_data_axis(self, kind: str, degree: int, tmp_path: Path) -> None:
        rows = make_rows([150, 201, 64, 97])
        arrow = datasets.Dataset.from_dict({"input_ids": [r["input_ids"].tolist() for r in rows], "extra": ["x"] * 4})
        arrow = arrow.map(lambda row: {"labels": row["input_ids"]})
        dataset: Any = {
            "map": rows,
            "arrow": arrow,
            "iterable": Endless(rows),
            "arrow_iterable": arrow.remove_columns("extra").to_iterable_dataset(num_shards=2),
            "workers": rows,
        }[kind]
        args = arguments(tmp_path, ds_config(degree=degree), dataloader_num_workers=int(kind == "workers"))
        trainer, recorder = make_trainer(args, dataset, eval_dataset=dataset)
        trainer.train()
        evaluation = trainer.evaluate()
        per_step = 2 // degree
        expected = [loss for loss, _, _ in plain_training(rows, 2, per_step)]
        assert recorder.of("loss") == pytest.approx(expected, rel=1e-4)
        assert evaluation["eval_loss"] > 0

    @pytest.mark.parametrize("collator", ["default", "language_modeling", "flattening"])
    def test_documented_collators(self, collator: str, tmp_path: Path) -> None:
        lengths = [90, 90] if collator == "default" else [90, 40]
        collators: dict[str, Callable[..., Any]] = {
            "default": default_data_collator,
            "language_modeling": DataCollatorForLanguageModeling(word_tokenizer(), mlm=False),
            "flattening": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        }
        rows = make_rows(lengths, labels=collator == "default")
        args = arguments(tmp_path, max_steps=1, per_device_train_batch_size=2)
        trainer, recorder = make_trainer(args, rows, data_collator=collators[collator])
        trainer.train()
        expected = float(token_losses(tiny_model(), make_rows(lengths)).mean().detach())
        assert recorder.of("loss") == pytest.approx([expected], rel=1e-5)


class TestMetrics(DistributedTest):
    world_size = 2

    def test_dense_warm_up_density_and_tokens_are_reported(self, tmp_path: Path) -> None:
        rows = make_rows([290] * 4)
        measured: dict[str, Any] = {"offload": {"host_gib": 0.01}, "true_recall_rows": 8}
        config = ds_config(selector="price", dense_warmup_steps=2, eval_full_index=True, **measured)
        boards = ["tensorboard"] if find_spec("tensorboard") else []
        args = arguments(
            tmp_path, config, max_steps=4, include_num_input_tokens_seen="all", report_to=boards, **{CHECKPOINTING: True}
        )
        trainer, recorder = make_trainer(args, rows, eval_dataset=rows)
        with patch.object(flops, "peak_flops", lambda: 1e12):
            trainer.train()
        metrics = trainer.evaluate()
        if dist.get_rank() == 0:
            self.check_rates(recorder, trainer)
            self.check_file(tmp_path, recorder)
            if boards:
                self.check_board(tmp_path, recorder)
        density = recorder.of("density")
        assert density[:2] == [1.0, 1.0]
        assert all(0.1 < value < 0.9 for value in density[2:])
        assert all(0.1 < value < 1.0 for value in recorder.of("recall")[2:])
        assert all(value >= 1.0 for value in recorder.of("pair_imbalance") + recorder.of("time_imbalance"))
        assert all(0.0 <= value <= 1.0 for value in recorder.of("exposed"))
        assert all(value > 0 for value in recorder.of("tokens_per_s"))
        assert metrics["eval_density"] == 1.0
        assert trainer.state.num_input_tokens_seen == 4 * 290
        assert [entry["layer"] for entry in trainer.attention_metrics["per_layer"]] == [0, 1]

    def test_a_run_that_is_not_resumed_has_a_log_of_its_own(self, tmp_path: Path) -> None:
        rows = make_rows([100] * 4)
        logs = [tmp_path / "earlier_1" / "metrics.jsonl", tmp_path / "earlier_2" / "metrics.jsonl", tmp_path / "metrics.jsonl"]
        maps: dict[str, Any] = {"maps": {"every": 1}}
        for steps in (1, 2):
            args = arguments(tmp_path, ds_config(selector="price", **maps), max_steps=steps, eval_on_start=True)
            trainer, _ = make_trainer(args, rows, eval_dataset=rows)
            trainer.train()
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
        make_trainer(arguments(tmp_path, max_steps=1, **saving), rows)[0].train()
        make_trainer(arguments(tmp_path, max_steps=2, **saving), rows)[0].train(resume_from_checkpoint=True)
        dist.barrier()
        lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
        of_log = [[(line.get("event"), line["step"]) for line in log] for log in lines]
        assert of_log[0] == [("evaluation", 0), ("start", 0), (None, 1)]
        assert of_log[1] == [("evaluation", 0), ("start", 0), (None, 1), (None, 2)]
        assert of_log[2] == [("start", 0), (None, 1), ("start", 1), (None, 2)], "resumed: as before, one log"
        assert [len(read_maps(log.parent)) for log in logs] == [1, 2, 0]

    def check_rates(self, recorder: Any, trainer: Any) -> None:
        """Tokens and pairs of a step are those of the row that both ranks share."""
        ranks, pairs = 2, causal_triangle(290)
        parameters = flops.matrix_parameters(trainer.model)
        for line in [line for line in recorder.lines if "loss" in line]:
            assert line["tokens_per_s"] * line["step_s"] == pytest.approx(290)
            for name, counted in (("executed", pairs * line["density"]), ("dense_equivalent", pairs)):
                expected = flops.step_flops(trainer.model.config, parameters, 290, counted) / (line["step_s"] * ranks * 1e12)
                assert line[f"mfu_{name}"] == pytest.approx(expected)
            kept_bytes = line["peak_host_gib"] * 2**30
            shard = 3 * 64 * 32 * 4  # the longer shard of 290 tokens: 3 of 5 blocks
            assert 2 * shard <= kept_bytes <= 0.01 * 2**30, "each layer's input at least"
            assert line["peak_disk_gib"] == 0
        sparse = recorder.lines[2]
        assert sparse["recall_worst"] <= sparse["recall_middle"] <= 1 and 0 < sparse["recall_late"] <= 1
        assert "recall_middle" not in recorder.lines[0], "dense steps measure no recall"

    def check_file(self, folder: Path, recorder: Any) -> None:
        """What a run leaves for `ds-sparse-ring inspect`."""
        start, *lines, evaluation = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert (start["event"], start["step"], start["steps"]) == ("start", 0, 4)
        job = job_of(read_run(folder / "metrics.jsonl"), "cpu")  # what `ds-sparse-ring plan --compare` simulates
        assert (job.world, job.tokens, job.model.num_hidden_layers, job.zero_stage) == (2, 290, 2, 3)
        assert [line["loss"] for line in lines] == recorder.of("loss")
        assert all(len(line["per_layer"]) == 2 and line["per_hop"]["forward"]["compute_s"] for line in lines)
        assert (evaluation["event"], evaluation["step"], evaluation["density"]) == ("evaluation", 4, 1.0)

    def check_board(self, folder: Path, recorder: Any) -> None:
        """Through Trainer's own callback."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(next(folder.rglob("events.out.tfevents*")).parent)).Reload()
        steps = {tag: [scalar.value for scalar in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
        for key in ("tokens_per_s", "mfu_executed", "density", "recall", "exposed", "time_imbalance", "peak_host_gib"):
            assert steps[f"train/{key}"] == pytest.approx(recorder.of(key), rel=1e-5), key
        layers = [steps[f"train/density_layer_{layer:02}"] for layer in range(2)]
        assert [sum(values) / 2 for values in zip(*layers, strict=True)] == pytest.approx(recorder.of("density"), rel=1e-5)
        assert steps["eval/density"] == [1.0]

    def test_attention_is_measured_only_for_steps_that_are_logged(self, tmp_path: Path) -> None:
        active: list[bool] = []

        class Watch(TrainerCallback):
            def on_substep_end(self, *_: Any, **__: Any) -> None:
                active.append(trainer.ring.meter.active)

        args = arguments(tmp_path, max_steps=4, logging_steps=2, gradient_accumulation_steps=2)
        trainer, recorder = make_trainer(args, make_rows([100] * 8))
        trainer.add_callback(Watch())
        trainer.train()
        assert active == [False, True, False, True]
        assert len(recorder.of("density")) == 2

    def test_checkpointing_asked_of_trainer_is_ours(self, tmp_path: Path) -> None:
        checkpointing: dict[str, Any] = {CHECKPOINTING: True}
        args = arguments(tmp_path, max_steps=1, **checkpointing)
        trainer, _ = make_trainer(args, make_rows([100] * 2))
        trainer.train()
        layers = [m for m in trainer.model.modules() if getattr(m, "gradient_checkpointing", False)]
        assert len(layers) >= 2
        assert all(m._gradient_checkpointing_func.keywords["context_fn"] is checkpoint_context_fn for m in layers)


class TestRefusals(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
            ({"label_smoothing_factor": 0.1}, "label_smoothing_factor .*: leave it out"),
            ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
            ({"accelerator_config": {"split_batches": True}}, "split_batches"),
            ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
            ({"include_for_metrics": ["inputs"]}, "include_for_metrics"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_arguments_that_would_change_the_result(self, values: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(SparseRingError, match=message):
            make_trainer(arguments(tmp_path, **values), make_rows([10]))

    def test_a_loss_function_that_would_shift_labels_again(self, tmp_path: Path) -> None:
        with pytest.raises(SparseRingError, match="compute_loss_func"):
            make_trainer(arguments(tmp_path), make_rows([10]), compute_loss_func=lambda *_, **__: None)

    def test_a_configuration_without_our_section(self, tmp_path: Path) -> None:
        config = ds_config()
        del config["sparse_ring"]
        with pytest.raises(SparseRingError, match=r'add "sparse_ring"'):
            make_trainer(arguments(tmp_path, config), make_rows([10]))

    def test_a_batch_that_cannot_fit_before_the_first_step(self, tmp_path: Path) -> None:
        trainer, _ = make_trainer(arguments(tmp_path), make_rows([200] * 4))
        with patch.object(memory, "device_bytes", lambda: 2**18), pytest.raises(SparseRingError, match="200 tokens .*262144"):
            trainer.train()
        assert trainer.state.global_step == 0

    def test_words_that_the_model_lacks_before_its_first_forward_pass(self, tmp_path: Path) -> None:
        rows = make_rows([20] * 4)
        rows[0]["input_ids"][3] = VOCABULARY
        trainer, _ = make_trainer(arguments(tmp_path), rows)
        calls: list[Any] = []
        trainer.model.register_forward_pre_hook(lambda *_: calls.append(1))
        with pytest.raises(SparseRingError, match=f"is {VOCABULARY}, and the model has {VOCABULARY} words"):
            trainer.train()
        assert not calls and not (tmp_path / "metrics.jsonl").exists()

    def test_a_model_of_unknown_sizes_is_not_checked_and_trains(self, tmp_path: Path) -> None:
        trainer, _ = make_trainer(arguments(tmp_path, max_steps=1), make_rows([200] * 4))
        sizes = trainer.model.config.to_dict()
        del sizes["intermediate_size"], sizes["num_key_value_heads"]
        said = StringIO()
        unknown = patch.object(type(trainer.model.config), "to_dict", lambda self: dict(sizes))
        with unknown, patch.object(memory, "device_bytes", lambda: 1), redirect_stdout(said):
            trainer.train()
        assert trainer.state.global_step == 1
        line = "memory is not checked before the first step: LlamaConfig says nothing about intermediate_size"
        assert said.getvalue().count(line) == (dist.get_rank() == 0)
        assert said.getvalue().count("sequences per step") == (dist.get_rank() == 0), "the set-up, once"

    def test_a_batch_without_labels(self, tmp_path: Path) -> None:
        trainer, _ = make_trainer(arguments(tmp_path), make_rows([10, 10], labels=False))
        with pytest.raises(SparseRingError, match="no labels"):
            trainer.train()

    @pytest.mark.parametrize("deepspeed", [True, False])
    def test_training_after_an_evaluation_which_transformers_does_not_prepare(self, deepspeed: bool, tmp_path: Path) -> None:
        args = arguments(tmp_path) if deepspeed else arguments(tmp_path, deepspeed=None)
        _ = args.device
        ring = SparseRing(SparseRingConfig(**section()))
        rows = make_rows([10, 10])
        trainer, _ = make_trainer(args, rows, eval_dataset=rows, ring=ring)
        trainer.evaluate()
        with pytest.raises(SparseRingError, match="eval_on_start"):
            trainer.train()

    def test_ranks_that_trainer_does_not_see(self, tmp_path: Path) -> None:
        # without use_cpu on a machine without a GPU each process takes itself for the only one
        if rank_device().type == "cuda":
            pytest.skip("needs a machine without a GPU")
        args = arguments(tmp_path, use_cpu=False)
        with pytest.raises(SparseRingError, match="use_cpu=True"):
            make_trainer(args, make_rows([10]))


class TestRowsThatEvaluationLacks:
    def test_rows_are_completed_to_a_multiple(self) -> None:
        rows = CompleteRows([{"a": i, "b": i} for i in range(5)], 4, frozenset("a"))
        assert len(rows) == 8
        assert rows.present == 5
        assert [isinstance(rows[i], Absent) for i in range(8)] == [False] * 5 + [True] * 3
        assert rows[7].row == {"a": 0}

    def test_so_is_a_stream(self) -> None:
        stream = CompleteStream(range(5), 4)
        assert [row for row in stream if not isinstance(row, Absent)] == [0, 1, 2, 3, 4]
        assert len(list(stream)) == 8
        assert stream.present == 5

    def test_a_batch_of_absent_rows_has_no_target(self) -> None:
        ring = SparseRing(SparseRingConfig(**section()))
        collate = BatchCollator(ring.collator(default_data_collator))
        row = make_rows([70])[0]
        some = collate([row, Absent(row)])
        none = collate([Absent(row), Absent(row)])
        assert (some["present_rows"], some["sparse_ring"].tokens) == (1, 70)
        assert (none["present_rows"], none["sparse_ring"].tokens) == (0, 70)
        assert (some["shift_labels"] != -100).sum() == 69
        assert (none["shift_labels"] == -100).all()
        assert "present_rows" not in collate([row, row])
