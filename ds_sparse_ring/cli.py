"""The command ``ds-sparse-ring``: what is installed here, and what a configuration means."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_sparse_ring.errors import SparseRingError, refusals_end_the_program

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

app = typer.Typer(
    name="ds-sparse-ring",
    help="Long-context training with dynamic sparse attention on a striped ring.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench = typer.Typer(name="bench", help="Benchmarks: Markdown tables on the terminal, JSON beside them.", no_args_is_help=True)
app.add_typer(bench)


# Written out: importing the tables takes the time of importing torch.
_MODELS = "qwen2.5-3b, qwen2.5-7b, llama-3.1-8b, qwen3-8b, qwen2.5-32b, llama-3.1-70b, or a folder with config.json."
_PROFILES = "h200, h100, a100-80gb, a100-40gb, cpu, or a JSON file with such a profile."


def _add_benchmark(name: str, summary: str) -> None:
    """``bench NAME``, which hands its arguments to ``main`` of ds_sparse_ring.bench.NAME; that is imported only then."""

    @bench.command(
        name,
        help=summary,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    )
    def command(context: typer.Context) -> None:
        benchmark = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        benchmark.command()(importlib.import_module(f"ds_sparse_ring.bench.{name}").main)
        with refusals_end_the_program():
            benchmark(context.args, prog_name=context.command_path, standalone_mode=False)


for _name, _summary in {
    "cpu": "The CPU kernels beside PyTorch's dense attention.",
    "kernel": "Sparse attention of one layer on a GPU beside dense attention and other libraries.",
    "index": "What it takes to choose an index.",
    "layer": "A decoder layer by the tokens that pass through it at once: time and memory.",
    "balance": "What layouts make of a sparse index, counted: work of ranks, and of the ranks of a hop.",
    "scaling": "Training steps on several numbers of GPUs, by layout and index, beside the predictions of plan.",
}.items():
    if importlib.util.find_spec(f"ds_sparse_ring.bench.{_name}") is not None:
        _add_benchmark(_name, _summary)


@app.command()
def report() -> None:
    """Show versions, devices, and which compiled ops are installed or can be built here; DeepSpeed's own ops follow."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from ds_sparse_ring import __version__
    from ds_sparse_ring.versions import installed_versions

    console = Console()
    versions = Table("library", "installed", "supported", title=f"ds_sparse_ring {__version__}", title_justify="left")
    versions.add_row("python", platform.python_version(), ">=3.10")
    for library in installed_versions():
        versions.add_row(library.name, library.found or "-", library.supported)
    console.print(versions)

    machine = Table("", "", title="machine", title_justify="left", show_header=False)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine.add_row("GPUs", ", ".join(gpus) or "none: ranks run on the CPU and speak gloo")
    machine.add_row("CUDA of torch", torch.version.cuda or "none")
    machine.add_row("NCCL", "yes" if torch.distributed.is_nccl_available() else "no")
    machine.add_row("CPU cores", str(os.cpu_count()))
    machine.add_row("extensions are built in", os.environ.get("TORCH_EXTENSIONS_DIR", "torch's default folder"))
    console.print(machine)
    console.print(_ops_table())

    from deepspeed.env_report import op_report

    op_report(verbose=False)


def _ops_table() -> Table:
    from rich.table import Table

    from ds_sparse_ring.op_builder import ALL_BUILDERS

    ops = Table("op of ds_sparse_ring", "installed", "compatible", "remark", title="compiled ops", title_justify="left")
    ops.columns[0].no_wrap = True  # a narrow terminal shortens the remark
    for builder in (make() for make in ALL_BUILDERS):
        prebuilt, compatible = builder.is_prebuilt(), builder.is_compatible()
        remark = "" if prebuilt else "compiled when first used" if compatible else str(builder.error_log)
        ops.add_row(builder.NAME, "yes" if prebuilt else "no", "yes" if compatible else "no", remark)
    return ops


@app.command()
def config(
    file: Annotated[Path, typer.Argument(help='A DeepSpeed JSON file with a section "sparse_ring".')],
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks; shows how they are divided.")] = None,
) -> None:
    """Check a DeepSpeed JSON file and show its section "sparse_ring", with all defaults that its selector reads filled in."""
    from rich.console import Console

    from ds_sparse_ring.config import SparseRingConfig
    from ds_sparse_ring.config_reads import unread

    with refusals_end_the_program():
        section = SparseRingConfig.from_deepspeed(file)
        degree = None if world is None else section.check_degree(world)
    console = Console()
    hidden = unread(section.selector)
    console.print(_section_table(section, str(file), hidden))
    if hidden:
        console.print(f'of the section, not read by selector "{section.selector.kind}": {", ".join(hidden)}')
    if world is not None and degree is not None:
        rings = world // degree
        console.print(f"{world} ranks = {rings} sequence{'s' if rings > 1 else ''} at once x {degree} ranks that share each")


@app.command()
def inspect(
    run: Annotated[Path, typer.Argument(help="Output folder of Trainer or train/pretrain.py, or its metrics.jsonl.")],
    output: Annotated[Path | None, typer.Option(help="File to write; default: inspect.html in that folder.")] = None,
) -> None:
    """Write one HTML page about a run: curves, layers, hops, and attention maps with their index."""
    from ds_sparse_ring.inspect_run import write_page

    with refusals_end_the_program():
        print(write_page(run, output))


@app.command()
def plan(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help='A DeepSpeed JSON file with a section "sparse_ring".')] = None,
    model: Annotated[str, typer.Option(help=_MODELS)] = "qwen2.5-3b",
    seq: Annotated[str, typer.Option(help="Tokens of a sequence; K and M are 1024 and 1024 * 1024.")] = "128K",
    world: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 8,
    hardware: Annotated[str, typer.Option(help=_PROFILES)] = "h200",
    density: Annotated[float, typer.Option(help="Active share that the selector is expected to keep, 0 to 1.")] = 0.05,
    columns: Annotated[
        float | None,
        typer.Option(help="Share of all causal pairs that are columns; default: 0.3 x --density, of every_query all."),
    ] = None,
    liger: Annotated[bool, typer.Option("--liger", help="Norms, rotary embedding and gates by Liger's kernels.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Chrome trace to write, of one layer; a PNG goes beside it.")] = None,
    max_seq: Annotated[bool, typer.Option("--max-seq", help="Print the longest sequence that fits, in place of --seq.")] = False,
    compare: Annotated[Path | None, typer.Option(help="Output folder of a run: its step beside the simulated one.")] = None,
) -> None:
    """Simulate a training step for every schedule that the ranks and heads allow, and name the fastest."""
    from ds_sparse_ring.plan_compare import print_comparison
    from ds_sparse_ring.plan_report import parse_tokens, print_longest, print_plan, read_job

    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    with refusals_end_the_program():
        if compare is None:
            if max_seq and (idle := sorted(given & {"seq", "timeline"})):
                raise SparseRingError(f"plan: --max-seq finds the length itself: leave out --{', --'.join(idle)}")
            job = read_job(config, model, parse_tokens(seq), world, hardware, density, columns, liger=liger)
            print_longest(job, model) if max_seq else print_plan(job, model, timeline)
            return
        if idle := sorted(given - {"compare", "hardware"}):
            raise SparseRingError(
                f"plan: --compare takes all but --hardware from the log: leave out --{', --'.join(idle).replace('_', '-')}"
            )
        print_comparison(compare, hardware if "hardware" in given else None)


def _section_table(section: BaseModel, title: str, hidden: tuple[str, ...]) -> Table:
    from rich.table import Table

    table = Table("key", "value", "meaning", title=f'"sparse_ring" of {title}', title_justify="left")
    for key, value, meaning in _rows(section, ""):
        if key not in hidden:
            table.add_row(key, value, meaning)
    return table


def _rows(section: BaseModel, prefix: str) -> list[tuple[str, str, str]]:
    from pydantic import BaseModel

    rows = []
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if isinstance(value, BaseModel):
            rows += _rows(value, f"{prefix}{name}.")
            continue
        default = "" if name in section.model_fields_set else " (default)"
        meaning = " ".join((field.description or type(section).__doc__ or "").replace("``", "").split())
        rows.append((prefix + name, (value if isinstance(value, str) else json.dumps(value)) + default, meaning))
    return rows


if __name__ == "__main__":
    app()
