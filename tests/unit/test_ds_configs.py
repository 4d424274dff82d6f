"""The DeepSpeed files that come with the package: read strictly, filled completely, and usable both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring import ds_configs
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.ds_json import load_ds_json, resolve_auto
from ds_sparse_ring.errors import SparseRingError
from tests.common import DistributedTest, rank_device

NAMES = ["zero1", "zero2", "zero3", "zero3_cpu_offload"]
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_cpu_offload": 3}
ALL_VALUES: dict[str, Any] = {
    "micro_batch": 1,
    "world_size": 2,
    "accumulation": 3,
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip": 1.0,
    "bf16": False,
    "hidden_size": 16,
}

SECTION = SparseRingConfig()
"""Of all files: what keeps a model's quality, and lengths of segments that follow from who chooses."""


def filled(name: str, **values: Any) -> dict[str, Any]:
    return resolve_auto(load_ds_json(ds_configs.path(name)), **{**ALL_VALUES, **values})


def test_the_files_are_those_tested_here() -> None:
    assert ds_configs.names() == NAMES
    with pytest.raises(SparseRingError, match="zero1, zero2, zero3, zero3_cpu_offload"):
        ds_configs.path("zero4")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_its_stage_and_a_section_that_is_accepted(name: str) -> None:
    path = ds_configs.path(name)
    config = load_ds_json(path)
    zero = config["zero_optimization"]
    assert zero["stage"] == STAGES[name]
    assert SparseRingConfig.from_deepspeed(path) == SECTION
    if STAGES[name] == 3:
        assert zero["stage3_gather_16bit_weights_on_model_save"] is True
    for part in ("offload_optimizer", "offload_param"):
        assert (part in zero) == (name == "zero3_cpu_offload")
        assert zero.get(part, {"device": "cpu"})["device"] == "cpu"


@pytest.mark.parametrize("name", NAMES)
def test_every_auto_is_filled(name: str) -> None:
    original = load_ds_json(ds_configs.path(name))
    before = json.dumps(original)
    config = resolve_auto(original, **ALL_VALUES)
    assert json.dumps(original) == before
    assert '"auto"' not in json.dumps(config)
    assert config["train_batch_size"] == 6
    assert config["train_micro_batch_size_per_gpu"] == 1 and config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 1.0 and config["bf16"] == {"enabled": False}
    params = config["optimizer"]["params"]
    assert (params["lr"], params["betas"], params["weight_decay"]) == (1e-3, [0.9, 0.95], 0.1)
    if STAGES[name] == 3:
        assert config["zero_optimization"]["reduce_bucket_size"] == 256
        assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 230
        assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 160


def test_what_cannot_be_filled_is_named() -> None:
    config = load_ds_json(ds_configs.path("zero3"))
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    config["lists"] = [1, {"x": "auto"}]
    with pytest.raises(SparseRingError) as refusal:
        resolve_auto(config, **{**ALL_VALUES, "clip": None, "hidden_size": None})
    for key in (
        "gradient_clipping",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "scheduler.params.warmup_num_steps",
        "lists[1].x",
    ):
        assert key in str(refusal.value)
    assert "optimizer.params.lr" not in str(refusal.value)


def test_a_value_of_the_file_stays_and_must_agree_with_the_arguments() -> None:
    config = load_ds_json(ds_configs.path("zero2"))
    config["gradient_clipping"] = 0.5
    assert resolve_auto(config, **{**ALL_VALUES, "clip": None})["gradient_clipping"] == 0.5
    assert resolve_auto(config, **{**ALL_VALUES, "clip": 0.5})["gradient_clipping"] == 0.5
    config["train_batch_size"] = 8
    with pytest.raises(SparseRingError) as refusal:
        resolve_auto(config, **ALL_VALUES)
    assert "gradient_clipping is 0.5 in the file and 1.0 in the arguments" in str(refusal.value)
    assert "train_batch_size is 8 in the file and 6 in the arguments" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,}', "not strict JSON.*line 1"),
        ('{"a": 1} // comment', "not strict JSON"),
        ("{'a': 1}", "not strict JSON"),
        ("[1]", "holds list, not an object"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": {"b": 1, "b": 2}}', 'the key "b" stands twice'),
    ],
)
def test_a_file_that_only_some_readers_accept_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(SparseRingError, match=message) as refusal:
        load_ds_json(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SparseRingError, match="cannot read .*absent.json: No such file"):
        load_ds_json(tmp_path / "absent.json")


class TestFiles(DistributedTest):
    world_size = 2
    timeout_s = 420  # offload compiles DeepSpeed's CPU Adam when it is first used

    @pytest.mark.parametrize("bf16", [False, True])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_file_trains_through_deepspeed_initialize(self, name: str, bf16: bool) -> None:
        import deepspeed

        config = filled(name, accumulation=1, bf16=bf16)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert SparseRingConfig.from_deepspeed(engine.config) == SECTION
        assert engine.zero_optimization_stage() == STAGES[name]
        x = torch.ones(4, 16, dtype=torch.bfloat16 if bf16 else torch.float32, device=rank_device())
        losses = []
        for _ in range(3):
            loss = (engine(x) - 1).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses[2] < losses[0]
        assert engine.get_global_grad_norm() > 0
        engine.destroy()

    @pytest.mark.parametrize("name", NAMES)
    def test_a_file_trains_through_the_trainer(self, name: str, tmp_path: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            deepspeed=str(ds_configs.path(name)),
            use_cpu=not torch.cuda.is_available(),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        shape = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
        tokens = torch.arange(8) % 32
        data = [{"input_ids": tokens, "labels": tokens}] * 16
        trainer = Trainer(model=LlamaForCausalLM(shape), args=arguments, train_dataset=data)
        trainer.train()
        assert arguments.world_size == dist.get_world_size() == 2
        engine: Any = trainer.model_wrapped
        config = engine.config  # every "auto" is filled by now
        assert config["train_batch_size"] == 4
        assert '"auto"' not in json.dumps(config)
        assert config["optimizer"]["params"]["lr"] == arguments.learning_rate
        assert SparseRingConfig.from_deepspeed(config) == SECTION
        assert trainer.state.log_history[0]["grad_norm"] > 0
