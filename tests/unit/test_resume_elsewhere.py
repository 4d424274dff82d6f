"""A run goes on, on another number of ranks, as the one that was not stopped: DeepSpeed's own tool converts its checkpoint."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.deepspeed import full_state_dict
from ds_sparse_ring.train.pretrain import Pretraining
from tests.common import DistributedTest
from tests.unit.parity_model import tiny_model
from tests.unit.test_integration_scripts import log_lines, options, write_config
from tests.unit.trainer_runs import arguments, ds_config, make_rows, make_trainer
from tests.worlds import Worlds


def convert(refusal: str) -> None:
    """Run the command of the message: rank 0 does, in this process, and the others wait."""
    (command,) = (line for line in refusal.splitlines() if line.strip().startswith("python"))
    python, of_module, module, *words = shlex.split(command)
    assert (python, of_module, module) == ("python", "-m", ds_to_universal.__name__)
    dist.barrier()  # a rank that is late would find it converted, and not be refused
    if dist.get_rank() == 0:
        in_this_process = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        with patch("sys.argv", [module, *words, *in_this_process]):
            ds_to_universal.main(ds_to_universal.parse_arguments())
    dist.barrier()


def copy_of(saved: Path, goal: Path) -> None:
    """Each world goes on from a copy of its own."""
    if dist.get_rank() == 0:
        shutil.copytree(saved, goal)
    dist.barrier()


def model_of(kind: str, bf16: bool) -> Any:
    if kind == "adapted":
        pytest.importorskip("peft")
        from tests.unit.test_integration_lora import adapted_model

        return adapted_model()
    model = tiny_model()
    if kind == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model.bfloat16() if bf16 else model


_EVERY_STEP = (("strategy", "steps"), ("steps", 1))


class TestTrainer(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("stage", "ranks", "model", "bf16"),
        [
            (0, (2, 1), "llama", False),
            (1, (1, 2), "tied", True),
            (2, (1, 2), "adapted", False),
            (3, (2, 1), "llama", False),
            (3, (1, 2), "tied", True),
            (3, (2, 1), "adapted", False),
        ],
    )
    @pytest.mark.slow(stage=[0, 2])
    def test_three_steps_here_and_three_there_equal_six(
        self, stage: int, ranks: tuple[int, int], model: str, bf16: bool, tmp_path: Path
    ) -> None:
        # 2 rows a step, from rows that are shuffled anew each epoch, the second of which begins before the stop
        worlds, (before, after) = Worlds(tmp_path), ranks
        kept: dict[str, Any] = {}
        with worlds.of(before) as number:
            trainer, whole = self.trainer(tmp_path / f"before{number}", before, stage, model, bf16)
            trainer.train()
            kept = full_state_dict(trainer.deepspeed)
        with worlds.of(after) as number:
            out = tmp_path / f"after{number}"
            copy_of(tmp_path / "before0" / "checkpoint-3", out / "checkpoint-3")
            if stage > 0:
                trainer, _ = self.trainer(out, after, stage, model, bf16)
                with pytest.raises(SparseRingError, match=f"written by {before} ranks, here are {after}") as refused:
                    trainer.train(resume_from_checkpoint=True)
                convert(str(refused.value))
            trainer, resumed = self.trainer(out, after, stage, model, bf16)
            trainer.train(resume_from_checkpoint=True)
            self.check_logs(whole, resumed, rel=2e-3 if bf16 else 1e-5)
            assert not trainer.deepspeed.load_universal_checkpoint(), "nothing else is converted"
            state = full_state_dict(trainer.deepspeed)
            if dist.get_rank() == 0 and kept:
                for name, value in state.items():
                    torch.testing.assert_close(value, kept[name], rtol=0, atol=1e-2 if bf16 else 1e-6)
            assert json.loads((out / "checkpoint-6" / "sparse_ring.json").read_text())["world"] == after

    def test_the_best_model_of_more_ranks_is_loaded_at_the_end(self, tmp_path: Path) -> None:
        worlds, rows = Worlds(tmp_path), make_rows([150, 201])
        best = tmp_path / "before" / "checkpoint-1"
        args = arguments(best.parent, ds_config(2), max_steps=1, save_strategy="steps", save_steps=1)
        trainer, _ = make_trainer(args, rows)
        trainer.train()
        kept = full_state_dict(trainer.deepspeed)
        if dist.get_rank() == 0:
            state = json.loads((best / "trainer_state.json").read_text())
            state |= {"best_model_checkpoint": str(best), "best_metric": 0.0}  # no later model is better
            (best / "trainer_state.json").write_text(json.dumps(state))
        with worlds.of(1) as number:
            out = tmp_path / f"after{number}"
            copy_of(best, out / "checkpoint-1")
            for folder in (out / "checkpoint-1", best):
                with pytest.raises(SparseRingError, match=f"{folder}/global_step1 was written by 2 ranks") as refused:
                    self.with_best(out, rows).train(resume_from_checkpoint=True)
                if folder != best:
                    convert(str(refused.value))
        convert(str(refused.value))
        with worlds.of(1) as number:
            trainer = self.with_best(tmp_path / f"after{number}", rows)
            trainer.train(resume_from_checkpoint=True)
            state = full_state_dict(trainer.deepspeed)
            assert trainer.state.global_step == 2 and not trainer.deepspeed.load_universal_checkpoint()
            for name, value in kept.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=0)

    def with_best(self, out: Path, rows: Any) -> Any:
        every_step: dict[str, Any] = {f"{what}_{how}": value for what in ("save", "eval") for how, value in _EVERY_STEP}
        args = arguments(out, ds_config(2, degree=1), max_steps=2, load_best_model_at_end=True, **every_step)
        return make_trainer(args, rows, eval_dataset=rows)[0]

    def trainer(self, out: Path, world: int, stage: int, model: str, bf16: bool) -> tuple[Any, Any]:
        moving: dict[str, Any] = {"schedule": {"target_density": 0.65, "gain": 0.5}}
        degree = 1 if stage in (1, 3) else world  # two rings of one rank, or one of two
        config = ds_config(stage, selector="price", degree=degree, **moving)
        if model == "tied":
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            config["zero_force_ds_cpu_optimizer"] = False
        values: dict[str, Any] = {
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 3,
            "lr_scheduler_type": "linear",
            "weight_decay": 0.1,
            "train_sampling_strategy": "random",
            "gradient_accumulation_steps": 2 * degree // world,
            "bf16": bf16,
        }
        return make_trainer(arguments(out, config, **values), make_rows([150, 201, 64, 97]), model_of(model, bf16))

    def check_logs(self, whole: Any, resumed: Any, rel: float) -> None:
        assert resumed.of("loss") == pytest.approx(whole.of("loss")[3:], rel=rel)
        assert resumed.of("grad_norm") == pytest.approx(whole.of("grad_norm")[3:], rel=10 * rel)
        assert resumed.of("learning_rate") == whole.of("learning_rate")[3:]
        assert resumed.of("price") == pytest.approx(whole.of("price")[3:], rel=rel)
        assert len(set(whole.of("price"))) > 3 and len(set(whole.of("learning_rate"))) == 6


class TestPretrain(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("stage", "ranks", "streaming", "bf16"),
        [(1, (2, 1), False, True), (3, (1, 2), True, False)],
    )
    def test_three_steps_here_and_three_there_equal_six(
        self, stage: int, ranks: tuple[int, int], streaming: bool, bf16: bool, corpus: Path, tmp_path: Path
    ) -> None:
        self.check(stage, ranks, corpus, tmp_path, streaming=streaming, bf16=bf16)

    @pytest.mark.world_size(4)
    def test_two_rings_on_four_ranks_go_on_as_one_on_two(self, corpus: Path, tmp_path: Path) -> None:
        self.check(2, (4, 2), corpus, tmp_path)

    def check(self, stage: int, ranks: tuple[int, int], corpus: Path, folder: Path, **values: Any) -> None:
        worlds, (before, after) = Worlds(folder), ranks
        kept: dict[str, Any] = {}
        with worlds.of(before) as number:
            whole = self.run(corpus, folder / f"before{number}", before, stage, **values)
            whole.run()
            kept = full_state_dict(whole.engine)
        with worlds.of(after) as number:
            out = folder / f"after{number}"
            copy_of(folder / "before0" / "checkpoints", out / "checkpoints")
            if dist.get_rank() == 0:
                (out / "checkpoints" / "latest").write_text("step3")  # as if it had been stopped there
            dist.barrier()
            with pytest.raises(SparseRingError, match=f"written by {before} ranks, here are {after}") as refused:
                self.run(corpus, out, after, stage, resume=True, **values)
            convert(str(refused.value))
            resumed = self.run(corpus, out, after, stage, resume=True, **values)
            resumed.run()
            rel = 2e-3 if values.get("bf16") else 1e-5
            state = full_state_dict(resumed.engine)
            if dist.get_rank() == 0 and kept:
                for name, value in state.items():
                    torch.testing.assert_close(value, kept[name], rtol=0, atol=1e-2 if values.get("bf16") else 1e-6)
            if dist.get_rank() == 0:
                expected, actual = ([x for x in log_lines(d) if "event" not in x] for d in (folder / "before0", out))
                assert [line["step"] for line in actual] == [4, 6]
                assert actual[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=rel)
                assert actual[-1]["learning_rate"] == expected[-1]["learning_rate"]
                assert [line["price"] for line in actual] == [line["price"] for line in expected[1:]]

    def run(self, corpus: Path, out: Path, world: int, stage: int, **values: Any) -> Pretraining:
        # 2 rows a step: two rings with a row each, or one with two
        degree = world if world < 4 and stage == 2 else world // 2 or 1
        out.mkdir(parents=True, exist_ok=True)
        config = write_config(out, stage, degree=degree)
        return Pretraining(options(corpus, config, out, accumulation=2 * degree // world, save_steps=3, **values))
