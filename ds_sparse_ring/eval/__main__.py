"""``python -m ds_sparse_ring.eval``: RULER and long books, dense or sparse."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Annotated

import typer

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError, refusals_end_the_program
from ds_sparse_ring.plan_report import parse_tokens

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Folder of a model and its tokenizer.")],
    tasks: Annotated[str, typer.Option(help="ruler, niah, books, or tasks of RULER by name; with commas between.")] = "niah",
    lengths: Annotated[str, typer.Option(help="Tokens of prompts and of books' windows: 8K,32K; K is 1024.")] = "4K",
    samples: Annotated[int, typer.Option(min=1, help="Of each task and length; RULER has 500.")] = 50,
    sparse: Annotated[Path | None, typer.Option(help='DeepSpeed file: attend to prompts as its "sparse_ring" says.')] = None,
    book: Annotated[list[str] | None, typer.Option(help="A text file for the task books; may be given several times.")] = None,
    ruler_data: Annotated[Path | None, typer.Option(help="Folder of PaulGrahamEssays.json, squad.json, hotpotqa.json.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
) -> None:
    """Evaluate a model on one process. Prompts are attended to densely or, with --sparse, by an index; replies densely."""
    from rich.console import Console

    with refusals_end_the_program():
        if importlib.util.find_spec("lm_eval") is None:
            raise SparseRingError('eval: lm-eval is not installed: pip install ".[eval]" in the folder of this repository')
        from ds_sparse_ring.eval.run import Evaluation, evaluate, table_of

        job = Evaluation(
            model=model,
            tasks=tasks.split(","),
            lengths=[parse_tokens(length) for length in lengths.split(",")],
            samples=samples,
            sparse=None if sparse is None else SparseRingConfig.from_deepspeed(sparse),
            books=book or (),
            ruler_data=ruler_data,
            dtype=dtype,
        )
        lines = evaluate(job)
    Console(width=None if Console().is_terminal else 120).print(table_of(lines))
    if output is not None:
        output.write_text(json.dumps(lines, indent=2), encoding="utf-8")


if __name__ == "__main__":
    app()
