"""Tokenize and pack text once, before GPUs wait for it.

    python train/prepare_data.py corpus/ --tokenizer Qwen2.5-3B/ --sequence-tokens 524288 --evaluation-sequences 8 --output data/

``--data data/`` of train/pretrain.py and train/finetune.py reads what it writes, as does ``datasets.load_from_disk`` for a
script of your own (docs/how-to/packing.md).
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ds_sparse_ring.errors import SparseRingError, refusals_end_the_program
from ds_sparse_ring.train.data import load_documents, tokenize
from ds_sparse_ring.train.model import load_tokenizer
from ds_sparse_ring.train.rows import Summary, available_cores, packed_dataset, save_prepared, summarize

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder to write; it must not exist or be empty.")],
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Text, .jsonl or .parquet files, folders, patterns, folders of MDS shards; default: Python's own."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Folder of a tokenizer, or of a model with one.")] = "",
    sequence_tokens: Annotated[int, typer.Option(help="Tokens of a row, a multiple of 64.")] = 4096,
    evaluation_sequences: Annotated[int, typer.Option(help="Rows held out for evaluation.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the order of documents.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that tokenize; 0: one for each core.")] = 0,
) -> None:
    """Tokenize documents, pack them into rows block by block, and write the rows with a summary."""
    with refusals_end_the_program():
        if output.is_dir() and any(output.iterdir()):
            raise SparseRingError(f"--output: {output} is not empty; remove it or choose another folder")
        words = load_tokenizer(tokenizer or None, None)
        workers = workers or available_cores()
        data = packed_dataset(
            text or [],
            words,
            sequence_tokens=sequence_tokens,
            evaluation_sequences=evaluation_sequences,
            seed=seed,
            workers=workers,
        )
        tokens = tokenize(load_documents(text or []), words, workers=workers)  # from the cache
        summary = summarize(np.asarray(tokens.with_format("numpy")["length"]), data, words)
        save_prepared(output, data, summary, words)
    print_summary(summary, output)


def print_summary(summary: Summary, output: Path) -> None:
    """What was written, in a sentence and a table."""
    console = Console(width=None if Console().is_terminal else 120)
    console.print(
        f"{summary.documents} documents of {summary.tokens} tokens: {summary.rows} rows to train on, "
        f"{summary.evaluation_rows} to evaluate on, in {output}"
    )
    table = Table("", "", show_header=False)
    for name, value in asdict(summary).items():
        table.add_row(
            name, f"{value:.2%}" if name in ("padding", "filled") else f"{value:g}" if value != int(value) else f"{int(value)}"
        )
    console.print(table)


if __name__ == "__main__":
    app()
