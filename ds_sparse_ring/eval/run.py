"""What ``python -m ds_sparse_ring.eval`` runs, and the table of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.tasks import TaskManager
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.eval.language_model import LongTextLM
from ds_sparse_ring.eval.ruler import NIAH, RULER, SHORTEST, check_sources, find_sources, local_sources, score
from ds_sparse_ring.integrations.inference import SparsePrefill

BOOKS = "books"
SEED = 0
GROUPS = {"ruler": RULER, "niah": NIAH}
RULER_FOLDER = str(files("lm_eval.tasks") / "ruler")
"""Of lm-eval's tasks only these are read: all of them take half a minute."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate.

    Attributes:
        model: folder of model and tokenizer. tasks: of RULER, "ruler" or "niah" for all of them, "books".
        lengths: tokens of prompts, and of windows of books. samples: of each task and length.
        sparse: how prompts are attended to; None: densely.
        books: text files whose perplexity is measured. ruler_data: folder of RULER's texts.
    """

    model: str
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    sparse: SparseRingConfig | None = None
    books: Sequence[str] = ()
    ruler_data: Path | None = None
    dtype: str = "auto"
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")


def evaluate(job: Evaluation) -> list[dict[str, Any]]:
    """A line for each task and length: ``task``, ``length``, ``attention``, ``samples`` and what was measured; sparse ones with
    ``density`` and ``recall`` of their prompts.

    Raises:
        SparseRingError: an unknown task, files that are not there, or a model that sparse attention refuses.
    """
    tasks, folder = _tasks(job), find_sources(job.ruler_data)
    check_sources(tasks, folder)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=job.dtype)
    model.to(job.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    lines = []
    prefill = None if job.sparse is None else SparsePrefill(model, job.sparse)
    with nullcontext() if prefill is None else prefill:
        for length in job.lengths:
            lm = LongTextLM(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=1)
            for task in tasks:
                line = {"task": task, "length": length, "attention": "dense" if prefill is None else "sparse"}
                line |= _books(job, lm) if task == BOOKS else _ruler(job, lm, task, length, folder)
                kept = {} if prefill is None else prefill.ring.meter.pop()
                lines.append(line | {key: kept[key] for key in ("density", "recall") if key in kept})
    return lines


def table_of(lines: Sequence[dict[str, Any]]) -> Table:
    """For people."""
    table = Table("task", "length", "attention", "samples", "score", "density", "recall")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        shown = f"{line['score']:.3f}" if "score" in line else f"{line['bits_per_byte']:.3f} bits a byte"
        figures = [f"{line[key]:.3f}" if key in line else "-" for key in ("density", "recall")]
        table.add_row(line["task"], str(line["length"]), line["attention"], str(line["samples"]), shown, *figures)
    return table


def _tasks(job: Evaluation) -> list[str]:
    tasks = list(dict.fromkeys(task for name in job.tasks for task in GROUPS.get(name, (name,))))
    known = (*RULER, BOOKS)
    if unknown := [task for task in tasks if task not in known]:
        raise SparseRingError(f"eval: task {unknown[0]!r} is not known: use {', '.join([*GROUPS, *known])}")
    if (shortest := min(job.lengths)) < SHORTEST and tasks != [BOOKS]:
        raise SparseRingError(f"eval: prompts of {shortest} tokens are too short for RULER: give at least {SHORTEST}")
    if BOOKS in tasks and not job.books:
        raise SparseRingError("eval: the task books needs texts: give --book a text file, several times for several")
    if BOOKS in tasks and (missing := [book for book in job.books if not Path(book).is_file()]):
        raise SparseRingError(f"eval: the book {missing[0]} is not there: give --book a text file")
    return tasks


def _ruler(job: Evaluation, lm: LongTextLM, task: str, length: int, folder: Path | None) -> dict[str, Any]:
    metadata = {"max_seq_lengths": [length], "tokenizer": job.model}
    with local_sources(folder, job.samples):
        found = _run(lm, task, TaskManager(include_path=RULER_FOLDER, include_defaults=False, metadata=metadata))
    samples = found["samples"][task]
    if not all(sample["doc"]["outputs"] for sample in samples):
        raise SparseRingError(
            f"eval: {task} has no room for its answers in {length} tokens of this tokenizer: give a larger length"
        )
    return {"samples": len(samples), "score": sum(score(task, sample) for sample in samples) / len(samples)}


def _books(job: Evaluation, lm: LongTextLM) -> dict[str, Any]:
    task = {
        "task": BOOKS,
        "dataset_path": "text",
        "dataset_kwargs": {"data_files": {"test": list(job.books)}, "sample_by": "document"},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": metric} for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }
    found = _run(lm, task, TaskManager(include_defaults=False), limit=job.samples)
    figures = {key.split(",")[0]: value for key, value in found["results"][BOOKS].items() if isinstance(value, float)}
    names = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return {"samples": len(found["samples"][BOOKS]), **{name: figures[name] for name in names}}


def _run(lm: LongTextLM, task: Any, manager: TaskManager, limit: int | None = None) -> dict[str, Any]:
    set_seed(SEED)  # samples are drawn while the task is loaded
    found: Any = lm_evaluate(lm, manager.load([task]), limit=limit, bootstrap_iters=0, log_samples=True)
    return found
