"""Adapters of PEFT and the SFTTrainer of TRL on a ring: frozen weights, ZeRO-3, checkpointing and packing together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

from ds_sparse_ring.integrations.deepspeed import full_state_dict, save_pretrained
from ds_sparse_ring.integrations.trainer import SparseRingMixin, use_sparse_ring
from tests.common import DistributedTest
from tests.unit.parity_model import CHECKPOINTING, tiny_model, word_tokenizer
from tests.unit.trainer_runs import Recorder, arguments, ds_config, make_rows, make_trainer, plain_training, token_losses

peft = pytest.importorskip("peft")


def lora(**values: Any) -> Any:
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **values)


def adapted_model() -> Any:
    """The same weights and adapters whenever it is made; no adapter starts at 0, so that each has a gradient at once."""
    model = tiny_model()
    return peft.get_peft_model(model, lora(init_lora_weights=False))


class RingSFTTrainer(SparseRingMixin, SFTTrainer):
    """What a user writes."""


class TestLora(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("stage", [2, 3])
    def test_adapters_train_as_on_one_process_and_load_without_us(self, stage: int, tmp_path: Path) -> None:
        rows = make_rows([150, 201, 97, 64])
        checkpointing: dict[str, Any] = {CHECKPOINTING: True}
        args = arguments(tmp_path, ds_config(stage), max_steps=4, **checkpointing)
        trainer, recorder = make_trainer(args, rows, adapted_model())
        trainer.train()
        expected = list(plain_training(rows, 4, 1, adapted_model()))
        assert recorder.of("loss") == pytest.approx([loss for loss, _, _ in expected], rel=1e-4)
        assert recorder.of("grad_norm") == pytest.approx([norm for _, norm, _ in expected], rel=1e-3)
        state = full_state_dict(trainer.deepspeed)
        if dist.get_rank() == 0:
            before = adapted_model().state_dict()
            for name, parameter in expected[-1][2].named_parameters():
                torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-3, atol=1e-4)
                assert parameter.requires_grad or torch.equal(state[name], before[name]), f"{name} is frozen"
        save_pretrained(trainer.deepspeed, tmp_path / "ours")
        trainer.save_model(str(tmp_path / "theirs"))
        dist.barrier()
        unset_hf_deepspeed_config()
        plain = token_losses(expected[-1][2].eval(), rows).mean()
        for folder in ("ours", "theirs"):
            loaded = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / folder).eval()
            torch.testing.assert_close(token_losses(loaded, rows).mean(), plain, rtol=1e-5, atol=0)


class TestSupervisedFineTuning(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("packing", [False, True])
    def test_trl_trains_adapters_under_zero3(self, packing: bool, tmp_path: Path) -> None:
        rows = make_rows([100, 201, 97, 64])
        tokens = datasets.Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows]})
        plain = arguments(tmp_path, ds_config(3))
        values = {name: getattr(plain, name) for name in ("output_dir", "use_cpu", "deepspeed", "report_to", "disable_tqdm")}
        values |= {"per_device_train_batch_size": 4 if not packing else 1, "per_device_eval_batch_size": 2, "max_steps": 3}
        values |= {"logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "bf16": False, "shuffle_dataset": False}
        args = SFTConfig(packing=packing, eval_packing=False, max_length=512, dataloader_pin_memory=False, **values)
        recorder: TrainerCallback = Recorder()
        tokenizer = word_tokenizer()
        tokenizer.eos_token = "1"
        kind = SFTTrainer if packing else RingSFTTrainer  # both ways for a user to come here
        trainer = kind(
            tiny_model(), args, train_dataset=tokens, eval_dataset=tokens, peft_config=lora(), callbacks=[recorder],
            processing_class=tokenizer,
        )  # fmt: skip
        if packing:
            use_sparse_ring(trainer)
        trainer.train()
        expected = float(token_losses(tiny_model(), rows).mean().detach())
        losses = recorder.of("loss")  # type: ignore[attr-defined]
        assert losses[0] == pytest.approx(expected, rel=1e-4), "adapters begin at 0"
        assert losses[-1] < losses[0]
        evaluated = trainer.evaluate()["eval_loss"]
        trained = [full_state_dict(trainer.deepspeed)]
        dist.broadcast_object_list(trained)
        unset_hf_deepspeed_config()
        model = peft.get_peft_model(tiny_model(), lora())
        model.load_state_dict(trained[0])
        assert evaluated == pytest.approx(float(token_losses(model.eval(), rows).mean().detach()), rel=1e-4)
