"""Pretrain or continue to train a causal language model with ``deepspeed.initialize`` and a plain loop.

    deepspeed --num_gpus 8 train/pretrain.py --deepspeed ds_configs/zero3.json --text corpus/ --tokenizer tokenizer/ \
        --fresh_config '{"model_type": "llama", "hidden_size": 2048, ...}' --sequence_tokens 131072 --steps 1000

Every rank knows every row: text is tokenized and packed by the first rank of a host, or before by train/prepare_data.py. Which
rows a ring trains on follows from the step, so that a resumed run goes on where it was; the place in a stream is saved.
Without a GPU set DS_ACCELERATOR=cpu and use --num_accelerators.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import HfArgumentParser, set_seed
from transformers.integrations import HfDeepSpeedConfig

from ds_sparse_ring.batch import IGNORE, causal_triangle
from ds_sparse_ring.ds_json import load_ds_json, resolve_auto
from ds_sparse_ring.errors import SparseRingError, refusals_end_the_program
from ds_sparse_ring.integrations.deepspeed import Setup, initialize, join_ranks, loss_scale, print_setup, save_pretrained
from ds_sparse_ring.integrations.liger import use_liger_kernels
from ds_sparse_ring.integrations.memory import check_memory
from ds_sparse_ring.integrations.model_checks import check_words
from ds_sparse_ring.integrations.rate import Work, WorkRate, work_figures
from ds_sparse_ring.integrations.resume import StepShape, after_load, set_universal, universal_folder
from ds_sparse_ring.integrations.run_job import run_job
from ds_sparse_ring.integrations.tiled_loss import enable_tiled_loss
from ds_sparse_ring.integrations.trainer_data import PRESENT_ROWS, BatchCollator, CompleteRows, check_same_batch
from ds_sparse_ring.integrations.transformers import base_model_of, enable_gradient_checkpointing
from ds_sparse_ring.meter import SENT
from ds_sparse_ring.run_log import MetricsLog, RunJob, has_steps, save_maps
from ds_sparse_ring.runtime import SparseRing
from ds_sparse_ring.train.model import build_model, load_config, load_tokenizer
from ds_sparse_ring.train.rows import PackedCollator, RowStream, open_rows

_AT_LEAST_ONE = ("steps", "micro_batch", "accumulation", "sequence_tokens")
_AT_LEAST_NONE = ("warmup_steps", "loss_tile_tokens", "evaluation_sequences", "evaluation_steps", "save_steps", "yarn_from")


@dataclass
class PretrainArguments:
    """What a run is told; everything else stands in the DeepSpeed file."""

    deepspeed: str = field(metadata={"help": 'DeepSpeed JSON file with a section "sparse_ring"; "auto" is filled in.'})
    model: str | None = field(default=None, metadata={"help": "Folder of a model; without weights it starts afresh."})
    fresh_config: str | None = field(default=None, metadata={"help": "Instead: JSON of a model, or a file with it."})
    tokenizer: str | None = field(default=None, metadata={"help": "Folder of a tokenizer; default: the model's."})
    yarn_from: int = field(default=0, metadata={"help": "Stretch positions with YaRN from so many tokens to those of a row."})
    text: list[str] = field(
        default_factory=list, metadata={"help": "Text, .jsonl or .parquet files, folders, patterns; default: Python's own."}
    )
    data: str | None = field(default=None, metadata={"help": "Folder of train/prepare_data.py: rows instead of text."})
    streaming: bool = field(default=False, metadata={"help": "Read, tokenize and pack text while training goes on."})
    output: str = field(default="output", metadata={"help": "Folder of metrics.jsonl, checkpoints/ and model/."})
    sequence_tokens: int = field(default=4096, metadata={"help": "Tokens of a row, a multiple of 64; --data has its own."})
    steps: int = field(default=100, metadata={"help": "Optimizer steps in all, those before a resume included."})
    micro_batch: int = field(default=1, metadata={"help": "Rows per ring and micro-step."})
    accumulation: int = field(default=1, metadata={"help": "Micro-steps per optimizer step."})
    learning_rate: float = field(default=3e-4, metadata={"help": "Highest learning rate of AdamW."})
    warmup_steps: int = field(default=0, metadata={"help": "Steps of linear warm-up; a cosine to a tenth follows."})
    weight_decay: float = field(default=0.1, metadata={"help": "Of AdamW."})
    clip: float = field(default=1.0, metadata={"help": "Bound of the gradient norm; 0 is none."})
    bf16: bool = field(default=False, metadata={"help": "Train in bfloat16 with fp32 master weights."})
    loss_tile_tokens: int = field(default=0, metadata={"help": "Tokens of logits that exist at once; 0: all of them."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute layers, but not attention."})
    liger_kernel: bool = field(default=False, metadata={"help": "Liger's fused norms, rotary embedding and gates; on a GPU."})
    evaluation_sequences: int = field(default=0, metadata={"help": "Rows held out for evaluation."})
    evaluation_steps: int = field(default=0, metadata={"help": "Steps between evaluations; 0: at the end only."})
    save_steps: int = field(default=0, metadata={"help": "Steps between checkpoints; 0: at the end only."})
    save_last: bool = field(default=True, metadata={"help": "Save checkpoint and model at the end; measurements need neither."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint in the output folder."})
    seed: int = field(default=0, metadata={"help": "Of weights and of the order of rows."})
    local_rank: int = field(default=-1, metadata={"help": "Given by the launcher: the device of this process."})

    def __post_init__(self) -> None:
        """Refuse counts that cannot be.

        Raises:
            SparseRingError: naming the option.
        """
        for least, names in ((1, _AT_LEAST_ONE), (0, _AT_LEAST_NONE)):
            for name in names:
                if getattr(self, name) < least:
                    raise SparseRingError(f"--{name} {getattr(self, name)}: give at least {least}, or leave it out")

    def check_output(self) -> None:
        """Refuse the folder of another run, whose log would go on with this one's steps and whose checkpoints would be lost.

        Before ranks meet: later, rank 0 may have begun to write.

        Raises:
            SparseRingError: steps or checkpoints there, without ``resume``.
        """
        folder = Path(self.output)
        latest, log = folder / "checkpoints" / "latest", folder / MetricsLog.NAME
        if self.resume or not (latest.is_file() or has_steps(log)):
            return
        raise SparseRingError(
            f"--output {folder} is of a run that has begun ({latest if latest.is_file() else log} is there), which this one "
            "would write over: go on with it by --resume, or give another --output"
        )

    def check_evaluation(self, rows: Sized) -> None:
        """Refuse evaluations of nothing, which would be left out without a word.

        Args:
            rows: that are held out.

        Raises:
            SparseRingError: ``evaluation_steps`` without a row.
        """
        if self.evaluation_steps and not len(rows):
            raise SparseRingError(
                f"--evaluation_steps {self.evaluation_steps}, but there is no row to evaluate on: hold some out by "
                "--evaluation_sequences (of train/prepare_data.py: --evaluation-sequences), or leave it out"
            )


def main() -> None:
    """Parse the command line and train."""
    arguments: Any = PretrainArguments
    (args,) = HfArgumentParser(arguments).parse_args_into_dataclasses()
    with refusals_end_the_program():
        Pretraining(args).run()


class Pretraining:
    """One run: model, data and loop."""

    def __init__(self, args: PretrainArguments) -> None:
        self.args = args
        args.check_output()
        join_ranks()
        if args.local_rank >= 0:
            get_accelerator().set_device(args.local_rank)
        set_seed(args.seed)
        tokenizer = load_tokenizer(args.tokenizer, args.model, args.data)
        self.tokenizer = tokenizer
        data = open_rows(
            args.data,
            args.text,
            tokenizer,
            sequence_tokens=args.sequence_tokens,
            evaluation_sequences=args.evaluation_sequences,
            seed=args.seed,
            streaming=args.streaming,
        )
        args.check_evaluation(data.evaluation)
        args.sequence_tokens = data.sequence_tokens
        self.train_rows, self.evaluation_rows = data.train, data.evaluation
        self.stream = RowStream(data.train) if args.streaming else None
        self.engine, self.ring = self._build()
        self.device = torch.device(get_accelerator().current_device_name())
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.collate = BatchCollator(self.ring.collator(PackedCollator(pad)))
        self.log = RunOutput(Path(args.output), self.ring.axes.rank == 0)

    def _build(self) -> tuple[Any, SparseRing]:
        args = self.args
        model_config = load_config(
            args.model,
            args.fresh_config,
            self.tokenizer,
            sequence_tokens=args.sequence_tokens,
            yarn_from=args.yarn_from,
        )
        config = resolve_auto(
            load_ds_json(args.deepspeed),
            micro_batch=args.micro_batch,
            world_size=dist.get_world_size(),
            accumulation=args.accumulation,
            lr=args.learning_rate,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=args.weight_decay,
            clip=args.clip,
            bf16=args.bf16,
            hidden_size=model_config.hidden_size,
        )
        in_force = HfDeepSpeedConfig(config)  # as long as it lives: ZeRO-3 then partitions the model while it is made
        model = build_model(model_config, args.model, dtype=torch.bfloat16 if args.bf16 else torch.float32)
        if args.liger_kernel:
            use_liger_kernels(model)
        if args.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        if args.loss_tile_tokens:
            enable_tiled_loss(model, args.loss_tile_tokens)
        stage = in_force.get_value("zero_optimization.stage", 0)
        ring = SparseRing.from_deepspeed(config)
        latest = self.latest() if args.resume else None
        set_universal(config, latest is not None and self.step_shape(ring).check(latest, config, self.checkpoints))
        engine, *_ = initialize(
            model,
            config,
            ring=ring,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, self._learning_rate_factor),
        )
        print_setup(
            Setup(
                ring=ring,
                zero_stage=stage,
                micro_batch=args.micro_batch,
                accumulation=args.accumulation,
                dtype="bfloat16" if args.bf16 else "float32",
                gradient_checkpointing=args.gradient_checkpointing,
            )
        )
        return engine, ring

    def _learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        warmup = self.args.warmup_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, self.args.steps - warmup)
        return 0.1 + 0.45 * (1 + float(np.cos(np.pi * min(1.0, progress))))

    def job(self) -> RunJob:
        """What runs, for readers of the log."""
        args = self.args
        return run_job(
            self.engine.module,
            self.ring,
            self.device,
            sequence_tokens=args.sequence_tokens,
            micro_batch=args.micro_batch,
            accumulation=args.accumulation,
            zero_stage=self.engine.zero_optimization_stage(),
            loss_tile_tokens=args.loss_tile_tokens,
            liger=args.liger_kernel,
        )

    # ---- the loop

    def run(self) -> None:
        """Train to the last step, evaluate, save (but see ``save_last``)."""
        args, ring = self.args, self.ring
        begin = self.resume() if args.resume else 0
        self.log.write({"event": "start", "step": begin, "steps": args.steps, "job": self.job().model_dump()})
        rate, sums = WorkRate(), torch.zeros(2, dtype=torch.float64, device=self.device)
        self.logged_step = begin
        for step in range(begin, args.steps):
            log_step = (step + 1) % ring.config.log_steps == 0 or step + 1 == args.steps
            ring.step, ring.meter.active = step, log_step
            batches = [self.to_device(batch) for batch in self.micro_batches(step)]
            if step == begin:
                self.check_first_batch(batches[0]["sparse_ring"])
            learning_rate = self.engine.get_lr()[0]
            sums += self.train_step(batches)
            for batch in batches:
                rate.add(batch["sparse_ring"])
            if log_step:
                self.log_training(step + 1, sums, learning_rate, rate.pop())
                sums.zero_()
            with rate.paused():
                self.between_steps(step + 1)
        if args.save_last:
            self.save_model()

    def check_first_batch(self, sequence: Any) -> None:
        """Refuse other ranks' rows, words that the model lacks, and what cannot fit."""
        check_same_batch(sequence.digest, self.ring.axes, self.device)
        check_words(sequence.highest_word, base_model_of(self.engine.module).get_input_embeddings())
        tile, engine = self.args.loss_tile_tokens or sequence.tokens, self.engine
        check_memory(engine.module, engine.basic_optimizer, self.ring, engine.config, sequence, tile)

    def train_step(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """One optimizer step; returns this rank's sum of token losses and its share of all ranks' targets."""
        targets = self.ring.count_targets(batches)
        scale = loss_scale(self.ring, targets)
        total = torch.zeros((), device=self.device)
        self.engine.train()
        for batch in batches:
            loss_sum = self.token_loss_sum(batch)
            # the count of targets spans the accumulation already, DeepSpeed must not divide by its steps again
            self.engine.backward(loss_sum * scale, scale_wrt_gas=False)
            self.engine.step()
            total += loss_sum.detach()
        return torch.stack([total.double(), targets.double() / self.ring.axes.world_size])

    def token_loss_sum(self, batch: dict[str, Any]) -> Tensor:
        """Sum of this rank's token losses: the model's own loss, told that it has one target."""
        return self.engine(**batch, num_items_in_batch=torch.ones((), device=self.device)).loss

    def between_steps(self, step: int) -> None:
        """Evaluate and save when it is time."""
        args, last = self.args, step == self.args.steps
        if len(self.evaluation_rows) and (last or _due(step, args.evaluation_steps)):
            self.evaluate(step)
        if (last and args.save_last) or _due(step, args.save_steps):
            self.save(step)

    @torch.no_grad()
    def evaluate(self, step: int) -> float:
        """Mean loss over all targets of the held-out rows, sharded as training is."""
        ring, axes = self.ring, self.ring.axes
        ring.evaluating = True
        ring.meter.active = True
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in self.evaluation_batches():
            targets = (batch["shift_labels"] != IGNORE).sum()
            sums += torch.stack([self.token_loss_sum(batch).double(), targets.double()])
        loss_sum, count = axes.world_sum(sums).tolist()
        metrics = ring.meter.pop()
        ring.evaluating = False
        loss = loss_sum / max(count, 1)
        line = {"event": "evaluation", "step": step, "loss": loss}
        self.log.write({**line, **{key: metrics[key] for key in ("density", "recall") if key in metrics}})
        return loss

    def log_training(self, step: int, sums: Tensor, learning_rate: float, done: Work) -> None:
        """One line on the screen, one in metrics.jsonl; the loss is the mean over all targets since the last line."""
        axes, norm = self.ring.axes, self.engine.get_global_grad_norm()
        loss_sum, targets = axes.world_sum(sums.clone()).tolist()
        metrics, maps = self.ring.meter.pop(), self.ring.meter.pop_maps()
        steps, self.logged_step = step - self.logged_step, step
        (pairs,) = axes.world_totals([done.causal_pairs / axes.sequence_size])
        of_step = self.args.accumulation * axes.data_size * causal_triangle(self.args.micro_batch * self.args.sequence_tokens)
        line = {
            "step": step,
            "loss": loss_sum / max(targets, 1),
            "grad_norm": None if norm is None else float(norm),  # DeepSpeed has none for stage 0 in fp32
            "learning_rate": learning_rate,
            **work_figures(done, steps, metrics, base_model_of(self.engine), self.ring),
            "causal_share": pairs / (steps * of_step),  # inside documents, of all pairs of a micro-batch
            **metrics,
        }
        self.log.write(line)
        if axes.rank == 0:
            save_maps(Path(self.args.output), step, maps)

    # ---- data

    def micro_batches(self, step: int) -> Iterator[dict[str, Any]]:
        """This rank's part of the micro-batches of a step."""
        args, axes = self.args, self.ring.axes
        for micro_step in range(args.accumulation):
            if self.stream is not None:
                yield self.collate(self.stream.take(args.micro_batch, rank=axes.data_rank, ranks=axes.data_size))
                continue
            first = ((step * args.accumulation + micro_step) * axes.data_size + axes.data_rank) * args.micro_batch
            yield self.collate([self.train_rows[self.row_at(first + i)] for i in range(args.micro_batch)])

    def row_at(self, position: int) -> int:
        """The row at a position of the endless stream of shuffled epochs."""
        epoch, place = divmod(position, len(self.train_rows))
        return int(_shuffled(len(self.train_rows), self.args.seed, epoch)[place])

    def evaluation_batches(self) -> Iterator[dict[str, Any]]:
        """This rank's part of the held-out rows; a ring without rows left gets a batch without targets."""
        axes, size = self.ring.axes, self.args.micro_batch
        rows = CompleteRows(self.evaluation_rows, size * axes.data_size)
        for first in range(axes.data_rank * size, len(rows), size * axes.data_size):
            batch = self.to_device(self.collate([rows[first + i] for i in range(size)]))
            batch.pop(PRESENT_ROWS, None)
            yield batch

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with its tensors on this rank's device."""
        return {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in batch.items()}

    # ---- checkpoints

    @property
    def checkpoints(self) -> Path:
        """Folder of DeepSpeed's checkpoints."""
        return Path(self.args.output) / "checkpoints"

    def save(self, step: int) -> None:
        """Engine, step (whence the place in the data), moved prices, place of a stream, random state of every rank."""
        client_state: dict[str, Any] = {"step": step, "sparse_ring": self.ring.state_dict()}
        if self.stream is not None:
            client_state["stream"] = self.stream.state_dict()
        self.engine.save_checkpoint(str(self.checkpoints), tag=f"step{step}", client_state=client_state)
        states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        states["device"] = get_accelerator().get_rng_state()
        torch.save(states, self._random_state_file(step, self.ring.axes.rank))
        if self.ring.axes.rank == 0:
            self.step_shape(self.ring).save(self.checkpoints / f"step{step}")
        self.log.write({"event": "saved", "step": step, "path": str(self.checkpoints / f"step{step}")})

    def latest(self) -> Path | None:
        """Folder of the last checkpoint, if there is one."""
        latest = self.checkpoints / "latest"
        return self.checkpoints / latest.read_text(encoding="utf-8").strip() if latest.is_file() else None

    def resume(self) -> int:
        """Load the last checkpoint, if there is one; returns the steps done."""
        latest = self.latest()
        if latest is None:
            return 0
        tag = (universal_folder(latest) if self.engine.load_universal_checkpoint() else latest).name
        path, client_state = self.engine.load_checkpoint(str(self.checkpoints), tag)
        after_load(self.engine, self.checkpoints)
        if path is None:
            raise SparseRingError(
                f"resume: {self.checkpoints} holds no checkpoint that DeepSpeed can load: write the name of a whole one into its "
                "file latest, or begin in another output folder"
            )
        if (self.stream is None) == ("stream" in client_state):
            was = "without" if self.stream is not None else "with"
            raise SparseRingError(
                f"resume: {latest} was written {was} --streaming, which deals out rows in another order: go on as it began"
            )
        step = int(client_state["step"])
        self.ring.load_state_dict(client_state.get("sparse_ring", {}))
        if self.stream is not None:
            self.stream.load_state_dict(client_state["stream"])
        states = torch.load(self._saved_random_state(step), weights_only=False)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        get_accelerator().set_rng_state(states["device"])
        return step

    def step_shape(self, ring: SparseRing) -> StepShape:
        """What a step of this run takes."""
        return StepShape.of(ring, micro_batch=self.args.micro_batch, accumulation=self.args.accumulation)

    def _random_state_file(self, step: int, rank: int) -> Path:
        return self.checkpoints / f"step{step}" / f"random_state_rank{rank}.pt"

    def _saved_random_state(self, step: int) -> Path:
        """That of this rank; a rank that was not there when they were saved takes that of another."""
        saved = sum(1 for _ in (self.checkpoints / f"step{step}").glob("random_state_rank*.pt"))
        return self._random_state_file(step, self.ring.axes.rank % max(saved, 1))

    def save_model(self) -> None:
        """Model and tokenizer for plain Transformers."""
        folder = Path(self.args.output) / "model"
        save_pretrained(self.engine, folder, self.tokenizer)
        self.log.write({"event": "saved", "step": self.args.steps, "path": str(folder)})


_IN_FILE_ONLY = {
    "per_layer",
    "per_hop",
    "compute_s",
    "ring_wait_s",
    "columns_s",
    "heads_s",
    *SENT,
}


class RunOutput:
    """metrics.jsonl and one line on the screen for each of its lines, on rank 0."""

    def __init__(self, folder: Path, active: bool) -> None:
        self._log = MetricsLog(folder) if active else None

    def write(self, line: dict[str, Any]) -> None:
        """Write one line to both."""
        if self._log is None:
            return
        self._log.write(line)
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items() if k not in _IN_FILE_ONLY)
        print("  ".join(shown), flush=True)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@lru_cache(maxsize=2)
def _shuffled(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


if __name__ == "__main__":
    main()
