"""Liger's kernels in place of a model's own: losses and gradients of sharded batches, whole layers and chunks, and in Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.integrations.liger import use_liger_kernels
from ds_sparse_ring.integrations.transformers import attach, enable_gradient_checkpointing
from ds_sparse_ring.runtime import SparseRing

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytest.importorskip("liger_kernel")

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 128, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS = [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)]


def trained(kind: tuple[Any, Any], chunk: int | None, *, liger: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a fresh model in float32."""
    torch.manual_seed(0)
    model = kind[1](kind[0](**SIZES)).cuda().train()
    if liger:
        use_liger_kernels(model)
    enable_gradient_checkpointing(model)
    selector = {"kind": "fixed", "columns": 64, "slashes": 4}
    ring = SparseRing(SparseRingConfig(degree=1, selector=selector, segment_tokens=512, layer_chunk_tokens=chunk))
    ring.meter.active = False
    attach(model, ring)
    words = torch.randint(0, 128, (1, 3000), generator=torch.Generator().manual_seed(1))
    batch = ring.sequence_batch({"input_ids": words, "labels": words})
    loss = model(**{k: x.cuda() if isinstance(x, Tensor) else x for k, x in batch.items()}, num_items_in_batch=3000).loss
    loss.backward()
    return float(loss), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("chunk", [None, 700])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind[1].__name__)
def test_gradients_are_those_of_the_model_itself(kind: tuple[Any, Any], chunk: int | None) -> None:
    loss, gradients = trained(kind, chunk, liger=True)
    expected, own = trained(kind, chunk, liger=False)
    assert abs(loss - expected) < 1e-4
    for name, gradient in gradients.items():
        assert float((gradient - own[name]).norm()) <= 1e-3 * float(own[name].norm()), name


def test_trainer_applies_them_before_the_ring_is_attached(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import TrainingArguments

    from ds_sparse_ring.integrations.trainer import SparseRingTrainer

    words = torch.randint(0, 128, (4, 512), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Dataset.from_dict({"input_ids": words, "labels": words})
    losses = []
    for liger in (False, True):
        torch.manual_seed(0)
        args = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=1, logging_steps=1, report_to=[], bf16=False,
            use_liger_kernel=liger, save_strategy="no", learning_rate=1e-3, seed=0,
        )  # fmt: skip
        ring = SparseRing(SparseRingConfig(degree=1, segment_tokens=128))
        trainer = SparseRingTrainer(LlamaForCausalLM(LlamaConfig(**SIZES)), args, ring=ring, train_dataset=rows)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
