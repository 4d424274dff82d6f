"""Trainers on tiny models, and the ordinary training on one process that they must equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainingArguments

from ds_sparse_ring.integrations.trainer import SparseRingTrainer
from tests.common import rank_device
from tests.unit.parity_model import VOCABULARY, section, tiny_model

LEARNING_RATE = 3e-3


def make_rows(lengths: list[int], labels: bool = True) -> list[dict[str, Any]]:
    """Rows of random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    rows = [{"input_ids": torch.randint(1, VOCABULARY, (length,), generator=generator)} for length in lengths]
    return [{**row, "labels": row["input_ids"]} for row in rows] if labels else rows


def ds_config(stage: int = 3, **ring: Any) -> dict[str, Any]:
    """A DeepSpeed configuration as a file would hold it."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "sparse_ring": section(**{"selector": "full", **ring}),
    }


def arguments(folder: Any, config: dict[str, Any] | None = None, **values: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": rank_device().type == "cpu",
        "deepspeed": ds_config() if config is None else config,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "max_steps": 2,
        "logging_steps": 1,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**defaults, **values})


class Recorder(TrainerCallback):
    """Keeps what Trainer logs."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.lines.append(dict(logs))

    def of(self, key: str) -> list[float]:
        return [line[key] for line in self.lines if key in line]


def make_trainer(args: TrainingArguments, rows: Any, model: Any = None, **values: Any) -> tuple[Any, Recorder]:
    recorder = Recorder()
    model = tiny_model() if model is None else model
    return SparseRingTrainer(model, args, train_dataset=rows, callbacks=[recorder], **values), recorder


def token_losses(model: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    """Loss of every target of the rows, each row by itself."""
    losses = []
    for row in rows:
        logits = model(row["input_ids"][None]).logits[0, :-1]
        losses.append(cross_entropy(logits, row["labels"][1:], reduction="none"))
    return torch.cat(losses)


def plain_training(
    rows: list[dict[str, Any]], steps: int, rows_per_step: int, model: Any = None
) -> Iterator[tuple[float, float, Any]]:
    """Loss, gradient norm and model after each step of ordinary training with Transformers' SDPA on one process."""
    model = (tiny_model() if model is None else model).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(steps):
        first = step * rows_per_step
        loss = token_losses(model, [rows[(first + i) % len(rows)] for i in range(rows_per_step)]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach()), float(norm), model
