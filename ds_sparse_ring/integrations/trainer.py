"""The Transformers Trainer on a sparse ring.

Use `SparseRingTrainer` in place of ``Trainer``, put `SparseRingMixin` in front of a subclass of it, or call `use_sparse_ring`
on an instance of either:

    trainer = SparseRingTrainer(model, TrainingArguments(deepspeed="zero3.json", ...), train_dataset=...)

Everything else follows from the section ``"sparse_ring"`` of the DeepSpeed file. Trainer and DeepSpeed see plain data
parallelism over all ranks; the sequence axis lives in the data and in attention:

* the collator takes this rank's part of each batch, and the loaders follow the data axis, so that the ranks of a ring
  draw the same rows (`ds_sparse_ring.integrations.trainer_data`);
* a loss is the sum over this rank's targets by the count over all ranks and accumulation steps, times the number of
  ranks, as Trainer does by itself. The mean of gradients that every ZeRO stage takes is then that of one process;
* evaluation is sharded as training is. Its loss is the mean over all targets of the dataset, whatever the batch size.
"""

from __future__ import annotations

import itertools
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset as ArrowDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ds_sparse_ring.batch import IGNORE, Sequence
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.deepspeed import Setup, check_engine, print_setup, warn_if_whole
from ds_sparse_ring.integrations.memory import check_memory
from ds_sparse_ring.integrations.model_checks import check_words
from ds_sparse_ring.integrations.rate import WorkRate, work_figures
from ds_sparse_ring.integrations.resume import StepShape, after_load, read_universal, set_universal
from ds_sparse_ring.integrations.run_job import run_job
from ds_sparse_ring.integrations.trainer_arguments import check_arguments, make_ring
from ds_sparse_ring.integrations.trainer_data import (
    PRESENT_ROWS,
    BatchCollator,
    CompleteRows,
    CompleteStream,
    Stream,
    check_same_batch,
    follow_data_axis,
    gather_rows,
    present_rows,
)
from ds_sparse_ring.integrations.transformers import NAME, adopt_gradient_checkpointing, attach, base_model_of
from ds_sparse_ring.run_log import MetricsLog, save_maps, set_aside
from ds_sparse_ring.runtime import SparseRing

# Methods of Trainer are known to the type checker; at run time the mixin has no base, so it fits any subclass.
if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object


_STATE = "sparse_ring_schedule.json"
"""File of a checkpoint with what `SparseRing.state_dict` gives."""

_OF_THE_INDEX = ("density", "recall", "pair_imbalance")
"""What is reported of an evaluation."""

_OF_A_LAYER = ("density", "recall")
"""What is reported of each layer."""


class SparseRingMixin(_Base):
    """Put in front of ``Trainer`` or a subclass of it; see the module's docstring.

    Attributes:
        ring: the `SparseRing`. attention_metrics: what the last log line was made of, per layer too.
    """

    data_collator: Any
    gather_function: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        ring: SparseRing | None = None,
        **kw: Any,
    ) -> None:
        """As ``Trainer``.

        Args:
            ring: made from the section ``"sparse_ring"`` of ``args.deepspeed`` if left out.

        Raises:
            SparseRingError: arguments under which training would not equal that of one process.
        """
        if args is None:
            raise SparseRingError('SparseRingTrainer needs args=TrainingArguments(deepspeed=...) with a section "sparse_ring"')
        self.ring = make_ring(args) if ring is None else ring
        check_arguments(args, kw.get("compute_loss_func"))
        # Rank 0 would read for everyone, and its collator would hand every rank the part of rank 0.
        accelerator_config: Any = args.accelerator_config
        accelerator_config.dispatch_batches = False
        super().__init__(model, args, *rest, **kw)
        self._begin()

    def _begin(self) -> None:
        """What is ours of a Trainer that Transformers has made and that has a ring."""
        if not self.model_accepts_loss_kwargs:
            raise SparseRingError(f"{type(self.model).__name__} takes no num_items_in_batch, so its loss cannot be scaled")
        attach(self._model(), self.ring)
        ds: Any = getattr(self.args, "hf_deepspeed_config", None)
        if ds is not None and ds.is_zero3():
            warn_if_whole(self._model(), self.ring)
        self.data_collator = BatchCollator(self.ring.collator(self.data_collator))
        self.attention_metrics: dict[str, Any] = {}
        self._compare_batch, self._compare_evaluated, self._drawn = True, True, 0
        self._rate, self._logged_step = WorkRate(), 0
        self._file: MetricsLog | None = None
        self._eval_sums = torch.zeros(2, dtype=torch.float64)
        self.add_callback(_SparseRingCallback(self))

    def _model(self) -> nn.Module:
        assert isinstance(self.model, nn.Module)
        return self.model

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        if hasattr(self, "model_accepts_loss_kwargs"):  # before that, __init__ attaches the model
            attach(model, self.ring)
        return model

    # ---- data

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        axes = self.ring.axes
        if is_training:
            self._check_lengths(dataset)
            dataset = Stream(dataset) if isinstance(dataset, IterableDataset) else dataset
        else:
            if isinstance(dataset, ArrowDataset):
                dataset = self._remove_unused_columns(dataset, description=description)
            rows = batch_size * axes.data_size
            complete = CompleteStream if isinstance(dataset, IterableDataset) else CompleteRows
            dataset = complete(dataset, rows, self._used_columns())
        loader = super()._get_dataloader(dataset, description, batch_size, sampler_fn, is_training, dataloader_key)
        return follow_data_axis(loader, axes, is_training=is_training)

    def _check_lengths(self, dataset: Any) -> None:
        """Training data must end on all ranks at once. A stream's end is agreed on when it comes (`get_batch_samples`)."""
        if isinstance(dataset, IterableDataset):
            return
        lengths = [int(row[0]) for row in self.ring.axes.world_rows([float(len(dataset))])]
        if len(set(lengths)) > 1:
            raise SparseRingError(
                f"the training data has {min(lengths)} rows on rank {lengths.index(min(lengths))} and {max(lengths)} on rank "
                f"{lengths.index(max(lengths))}: give every rank the whole dataset, it is divided here"
            )

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if self.ring.axes.world_size > 1 and isinstance(self.train_dataset, IterableDataset):
            counts = [int(row[0]) for row in self.ring.axes.world_rows([float(len(batches))])]
            if (fewest := min(counts)) < max(counts):
                warnings.warn(
                    f"the stream of training data ended on rank {counts.index(fewest)} before others: the epoch ends for all",
                    stacklevel=2,
                )
            batches = batches[:fewest]
        return batches, self._get_num_items_in_batch(batches, device)

    def _used_columns(self) -> frozenset[str] | None:
        if not self.args.remove_unused_columns:
            return None
        self._set_signature_columns_if_needed()
        return frozenset(self._signature_columns or ())

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler:
        # Rows that complete the last batches must come last; the loss does not depend on the order.
        return SequentialSampler(eval_dataset)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) // self.ring.axes.sequence_size

    def _track_num_input_tokens(self, inputs: Mapping[str, Any]) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += self._over_data_axis(inputs[NAME].tokens)

    def _over_data_axis(self, value: float) -> int:
        total = self.ring.axes.world_sum(torch.tensor(value, dtype=torch.float64, device=self.args.device))
        return round(float(total) / self.ring.axes.sequence_size)

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = get_last_checkpoint(str(self.args.output_dir)) if resume_from_checkpoint is True else resume_from_checkpoint
        plugin = self.accelerator.state.deepspeed_plugin
        ds = {} if plugin is None else plugin.deepspeed_config
        set_universal(ds, isinstance(folder, str) and self._check_checkpoints(folder, ds))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_checkpoints(self, folder: str, ds: Mapping[str, Any]) -> bool:
        """`StepShape.check` of a checkpoint, and of that of the best model so far, which would fail after all steps otherwise."""
        universal, state = self._step_shape().check(folder, ds), Path(folder) / TRAINER_STATE_NAME
        if self.args.load_best_model_at_end and state.is_file():
            if (best := TrainerState.load_from_json(str(state)).best_model_checkpoint) is not None:
                self._step_shape().check(best, ds)
        return universal

    def _load_best_model(self) -> None:
        best: Any = self.state.best_model_checkpoint
        engine: Any = self.deepspeed
        if engine is None or best is None:
            super()._load_best_model()
            return
        read_universal(engine, self._step_shape().check(best, engine.config))
        super()._load_best_model()
        after_load(engine, best)

    def _step_shape(self) -> StepShape:
        args = self.args
        micro_batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        return StepShape.of(self.ring, micro_batch=micro_batch, accumulation=accumulation)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        if any("shift_labels" not in batch for batch in batch_samples):
            raise SparseRingError("the training batch has no labels: let the dataset or the data collator add them")
        targets = sum(((batch["shift_labels"] != IGNORE).sum().to(device) for batch in batch_samples), _zero(device))
        return self.ring.axes.world_sum(targets).clamp(min=1)  # a step without any target has the loss 0, not 0 / 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        sequence: Sequence = inputs[NAME]
        if self._compare_batch:
            check_same_batch(sequence.digest, self.ring.axes, self.args.device)
            check_words(sequence.highest_word, base_model_of(self._model()).get_input_embeddings())
            self._check_memory(sequence)
            self._write(
                {"event": "start", "step": self.state.global_step, "steps": self.state.max_steps, **self._what_runs(sequence)}
            )
            self._compare_batch = False
        self._drawn = zlib.crc32(sequence.digest.to_bytes(4, "little"), self._drawn)
        self._rate.add(sequence)
        return super().training_step(model, inputs, num_items_in_batch)

    def _what_runs(self, sequence: Sequence) -> dict[str, Any]:
        """For readers of the log; of a model that the planner does not know, only what is ours."""
        engine: Any = self.deepspeed
        try:
            job = run_job(
                base_model_of(self._model()),
                self.ring,
                self.args.device,
                sequence_tokens=sequence.shape[1],
                micro_batch=sequence.shape[0],
                accumulation=self.args.gradient_accumulation_steps,
                zero_stage=0 if engine is None else engine.zero_optimization_stage(),
                liger=bool(self.args.use_liger_kernel),
            )
        except SparseRingError:
            return {"run": {"world": self.ring.axes.world_size, "sparse_ring": self.ring.config.model_dump()}}
        return {"job": job.model_dump()}

    def _check_memory(self, sequence: Sequence) -> None:
        engine: Any = self.deepspeed
        ds, optimizer = ({}, self.optimizer) if engine is None else (engine.config, engine.basic_optimizer)
        check_memory(base_model_of(self._model()), optimizer, self.ring, ds, sequence)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" not in logs or self.ring.evaluating:
            super().log(logs, start_time)
            return
        check_same_batch(self._drawn, self.ring.axes, self.args.device)  # those since the first one, too
        done, attention = self._rate.pop(), self._pop_meter()
        steps, self._logged_step = self.state.global_step - self._logged_step, self.state.global_step
        metrics = self.attention_metrics if attention else {}
        logs = {**logs, **work_figures(done, steps, metrics, base_model_of(self._model()), self.ring), **attention}
        super().log(logs, start_time)
        self._report_layers(metrics)
        self._write({"step": self.state.global_step, **logs, **metrics})
        maps = self.ring.meter.pop_maps()
        if self.ring.axes.rank == 0 and self.args.output_dir is not None:
            save_maps(Path(self.args.output_dir), self.state.global_step, maps)

    def _report_layers(self, metrics: Mapping[str, Any]) -> None:
        """Density and recall of each layer for ``report_to`` alone: on the screen they would be a page for every line."""
        layers = {f"{key}_layer_{entry['layer']:02}": entry[key] for entry in metrics.get("per_layer", []) for key in _OF_A_LAYER}
        takers = tuple(get_reporting_integration_callbacks(self.args.report_to))
        for callback in self.callback_handler.callbacks if layers else ():
            if isinstance(callback, takers):
                callback.on_log(self.args, self.state, self.control, logs=layers, model=self.model)

    def _write(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl in the output folder, as train/pretrain.py writes it; by rank 0."""
        if self.ring.axes.rank or self.args.output_dir is None:
            return
        if self._file is None:
            self._file = MetricsLog(Path(self.args.output_dir))
        self._file.write(line)

    def _begin_log(self) -> None:
        """A run that is not resumed has a log of its own; Trainer's users give the same output folder again and again."""
        if self.ring.axes.rank or self.args.output_dir is None:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        if (earlier := set_aside(Path(self.args.output_dir))) is not None:
            print(f"metrics.jsonl of an earlier run in {self.args.output_dir} is now in {earlier}", flush=True)

    def _pop_meter(self) -> dict[str, float]:
        """What the meter says in single figures; with lists per layer and per hop it stands in ``attention_metrics``."""
        metrics = self.ring.meter.pop()
        self.attention_metrics = metrics or self.attention_metrics
        return {key: value for key, value in metrics.items() if isinstance(value, float)}

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._rate.paused():
            super()._save_checkpoint(*args, **kwargs)
            folder = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            if self.is_world_process_zero() and folder.is_dir():
                self._step_shape().save(folder)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        state = self.ring.state_dict()  # collective
        if state and self.args.should_save:
            (Path(output_dir) / _STATE).write_text(json.dumps(state), encoding="utf-8")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.is_deepspeed_enabled:
            after_load(self.deepspeed, checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (saved := Path(checkpoint) / _STATE).is_file():
            self.ring.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        with self._rate.paused(), self._evaluating():
            self.gather_function = self._gather_rows
            output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
            loss_sum, targets = self.ring.axes.world_sum(self._eval_sums.to(self.args.device)).tolist()
            metrics = output.metrics if output.metrics is not None else {}
            if targets:
                metrics[f"{metric_key_prefix}_loss"] = loss_sum / targets
            attention = self._pop_meter()
            of_index = {key: attention[key] for key in _OF_THE_INDEX if key in attention}
            metrics.update({f"{metric_key_prefix}_{key}": value for key, value in of_index.items()})
            if targets:
                line = {"event": "evaluation", "name": metric_key_prefix, "step": self.state.global_step}
                self._write({**line, "loss": loss_sum / targets, **of_index})
        rows = present_rows(dataloader.dataset)
        return output._replace(metrics=metrics, num_samples=output.num_samples if rows is None else rows)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.ring.evaluating, self._compare_evaluated = True, True
        self.ring.meter.active = True
        self._eval_sums = torch.zeros(2, dtype=torch.float64)
        try:
            yield
        finally:
            self.ring.evaluating = False

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        inputs = self._prepare_inputs(inputs)
        sequence: Sequence = inputs[NAME]
        present = inputs.pop(PRESENT_ROWS, sequence.shape[0])
        if self._compare_evaluated:
            check_same_batch(sequence.digest, self.ring.axes, self.args.device)
            self._compare_evaluated = False
        loss = None
        with torch.no_grad(), self.compute_loss_context_manager():
            if "labels" in inputs:
                loss, outputs = self._evaluation_loss(model, inputs, with_outputs=not prediction_loss_only)
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0 if loss is None else 1]
        labels = None
        if "labels" in inputs:
            # zeros stand where the batch was padded: carried as label + 100, they come back as -100
            shifted = self.ring.gather(inputs["labels"] - IGNORE, sequence) + IGNORE
            labels = torch.nn.functional.pad(shifted[:, :-1], (1, 0), value=IGNORE)[:present]
        return loss, self.ring.gather(logits.detach(), sequence)[:present], labels

    def _evaluation_loss(self, model: nn.Module, inputs: dict[str, Any], *, with_outputs: bool) -> tuple[Tensor, Any]:
        """Mean loss over the targets of this ring's batch, which is also added to the sums of the dataset.

        Outputs are asked for only if they are used: trl's SFTTrainer runs the model again for them.
        """
        one = torch.ones((), device=self.args.device)
        computed: Any = self.compute_loss(model, inputs, return_outputs=with_outputs, num_items_in_batch=one)
        scaled, outputs = computed if with_outputs else (computed, None)
        local = torch.stack([scaled.double() / self.ring.axes.world_size, (inputs["labels"] != IGNORE).sum().double()])
        self._eval_sums += local.cpu()
        loss_sum, targets = self.ring.axes.ring_sum(local.clone())
        return (loss_sum / targets.clamp(min=1)).float(), outputs

    def _gather_rows(self, values: Any) -> Any:
        return gather_rows(values, self.ring.axes)


class SparseRingTrainer(SparseRingMixin, Trainer):
    """``Trainer`` on a sparse ring; see the module's docstring."""


def use_sparse_ring(trainer: Trainer, ring: SparseRing | None = None) -> None:
    """Put a Trainer that is made already on a ring, in place; before its ``train()`` and ``evaluate()``.

    Its class becomes that of `SparseRingMixin` in front of its own; nothing else of it is replaced.

    Args:
        trainer: a ``Trainer`` or an instance of a subclass.
        ring: made from the section ``"sparse_ring"`` of ``trainer.args.deepspeed`` if left out.

    Raises:
        SparseRingError: another object, a Trainer that is on a ring or has begun, or arguments as for `SparseRingTrainer`.
    """
    if not isinstance(trainer, Trainer):
        raise SparseRingError(f"use_sparse_ring takes an instance of transformers.Trainer, not {type(trainer).__name__}")
    if isinstance(trainer, SparseRingMixin):
        raise SparseRingError(f"this {type(trainer).__name__} is on a ring already: call use_sparse_ring once, on other Trainers")
    if trainer.is_in_train or trainer.state.global_step or trainer.model_wrapped is not trainer.model:
        raise SparseRingError(
            f"this {type(trainer).__name__} has begun to train or to evaluate, on whole rows: call use_sparse_ring right after "
            "it is made"
        )
    ring = make_ring(trainer.args) if ring is None else ring
    check_arguments(trainer.args, trainer.compute_loss_func)
    trainer.accelerator.dataloader_config.dispatch_batches = False  # as in SparseRingMixin.__init__
    plain = type(trainer)
    ours: Any = SparseRingTrainer
    if plain is not Trainer:
        ours = type(f"SparseRing{plain.__name__}", (SparseRingMixin, plain), {"__module__": plain.__module__})
    converted: Any = trainer
    converted.__class__ = ours
    converted.ring = ring
    converted._begin()


class _SparseRingCallback(TrainerCallback):
    """What has to happen at Trainer's own events."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, ring = self.trainer, self.trainer.ring
        adopt_gradient_checkpointing(trainer.model)
        if state.global_step == 0:
            trainer._begin_log()
        trainer._compare_batch, trainer._drawn = True, 0
        trainer._rate, trainer._logged_step = WorkRate(), state.global_step
        stage = 0
        if trainer.is_deepspeed_enabled:
            wrapped = trainer.accelerator.deepspeed_engine_wrapped is not None
        else:
            wrapped = ring.axes.world_size == 1 or trainer.model_wrapped is not trainer.model
        if not wrapped:
            raise SparseRingError(
                "gradients would not be averaged: Transformers does not prepare a model for training that it has evaluated "
                "before; set eval_on_start=True instead of calling evaluate() before train()"
            )
        if trainer.is_deepspeed_enabled:
            check_engine(trainer.deepspeed, ring)
            stage = trainer.deepspeed.zero_optimization_stage()
        print_setup(
            Setup(
                ring=ring,
                zero_stage=stage,
                micro_batch=args.per_device_train_batch_size,
                accumulation=args.gradient_accumulation_steps,
                dtype=str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
                gradient_checkpointing=any(getattr(m, "gradient_checkpointing", False) for m in trainer.model.modules()),
            )
        )

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        ring = self.trainer.ring
        ring.step = state.global_step
        # Measuring recall costs a probe per layer: only for the steps that are logged, if they can be told in advance.
        strategy, first = args.logging_strategy, args.logging_first_step and state.global_step == 0
        due = strategy == "epoch" or (strategy == "steps" and (state.global_step + 1) % state.logging_steps == 0)
        ring.meter.active = bool(first or due)


def _zero(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)
