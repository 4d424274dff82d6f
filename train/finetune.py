"""Fine-tune, or train afresh, a causal language model with the Transformers Trainer on a sparse ring.

    deepspeed --num_gpus 8 train/finetune.py --deepspeed ds_configs/zero3.json --model Qwen2.5-3B/ --text corpus/ \
        --sequence_tokens 131072 --evaluation_sequences 8 --output_dir output --max_steps 100 --bf16

Takes every option of TrainingArguments. Without a GPU set DS_ACCELERATOR=cpu, use --num_accelerators and add --use_cpu.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ds_sparse_ring.errors import SparseRingError, refusals_end_the_program
from ds_sparse_ring.integrations.deepspeed import join_ranks, save_pretrained
from ds_sparse_ring.integrations.trainer import SparseRingTrainer
from ds_sparse_ring.train.model import build_model, load_config, load_tokenizer
from ds_sparse_ring.train.rows import PackedCollator, open_rows


@dataclass
class ModelArguments:
    """Which model."""

    model: str | None = field(default=None, metadata={"help": "Folder of a model; without weights it starts afresh."})
    fresh_config: str | None = field(default=None, metadata={"help": "Instead: JSON of a model, or a file with it."})
    tokenizer: str | None = field(default=None, metadata={"help": "Folder of a tokenizer; default: the model's."})
    yarn_from: int = field(default=0, metadata={"help": "Stretch positions with YaRN from so many tokens to those of a row."})


@dataclass
class DataArguments:
    """Which text. Documents are packed into rows block by block; no token is lost."""

    text: list[str] = field(
        default_factory=list, metadata={"help": "Text, .jsonl or .parquet files, folders, patterns; default: Python's own."}
    )
    data: str | None = field(default=None, metadata={"help": "Folder of train/prepare_data.py: rows instead of text."})
    streaming: bool = field(default=False, metadata={"help": "Read, tokenize and pack text while training goes on."})
    sequence_tokens: int = field(default=4096, metadata={"help": "Tokens of a row, a multiple of 64; --data has its own."})
    evaluation_sequences: int = field(default=0, metadata={"help": "Rows held out for evaluation."})


def main() -> None:
    """Parse the command line, train, evaluate and save."""
    classes: Any = (ModelArguments, DataArguments, TrainingArguments)
    model_args, data_args, args = HfArgumentParser(classes).parse_args_into_dataclasses()
    with refusals_end_the_program():
        trainer, tokenizer = build_trainer(model_args, data_args, args)
        trainer.train(resume_from_checkpoint=checkpoint_to_resume(args))
        if trainer.eval_dataset is not None:
            trainer.save_metrics("eval", trainer.evaluate())
        save_pretrained(trainer.deepspeed, Path(args.output_dir) / "model", tokenizer)


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: TrainingArguments) -> tuple[Any, Any]:
    """Trainer and tokenizer."""
    if args.deepspeed is None:
        raise SparseRingError('give --deepspeed a JSON file with a section "sparse_ring", such as ds_configs/zero3.json')
    set_seed(args.seed)
    _ = args.device  # sets up torch.distributed; DeepSpeed needs its own view of it before ZeRO-3 partitions the model
    join_ranks()
    tokenizer = load_tokenizer(model_args.tokenizer, model_args.model, data_args.data)
    data = open_rows(
        data_args.data,
        data_args.text,
        tokenizer,
        sequence_tokens=data_args.sequence_tokens,
        evaluation_sequences=data_args.evaluation_sequences,
        seed=args.seed,
        streaming=data_args.streaming,
    )
    config = load_config(
        model_args.model,
        model_args.fresh_config,
        tokenizer,
        sequence_tokens=data.sequence_tokens,
        yarn_from=model_args.yarn_from,
    )
    model = build_model(config, model_args.model, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    trainer = SparseRingTrainer(
        model,
        args,
        data_collator=PackedCollator(pad),
        train_dataset=data.train,
        eval_dataset=data.evaluation if len(data.evaluation) else None,
        processing_class=tokenizer,
    )
    return trainer, tokenizer


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """The checkpoint that ``--resume_from_checkpoint`` names; "last" is the last one in the output folder, if any."""
    if args.resume_from_checkpoint != "last":
        return args.resume_from_checkpoint
    return get_last_checkpoint(args.output_dir) if Path(str(args.output_dir)).is_dir() else None


if __name__ == "__main__":
    main()
