"""Commands of README and docs are parsed as they stand by the programs that they name: their options exist. They are not run.

(`test_docs` runs those that plan, `test_how_to` that of packing.)
"""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from deepspeed.checkpoint import ds_to_universal
from deepspeed.launcher import runner

from ds_sparse_ring import cli
from ds_sparse_ring.eval import __main__ as evaluation
from ds_sparse_ring.train import prepare_data

from .test_docs import PAGES, ROOT, blocks

SET_UP = ("pip", "wait", "done")


class Parsed(Exception):
    """An argparse program has taken all its words."""


def commands(page: Path) -> list[list[str]]:
    """Words of each command of a page's bash blocks; the text between them has only parts of commands."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in lines]
    pieces = [piece for line in lines for piece in re.split(r"; |& |\bdo ", line) if "for gpu in" not in piece]
    words = [shlex.split(piece) for piece in pieces]
    return [found[next(i for i, w in enumerate(found) if not re.match(r"[A-Z_]+=", w)) :] for found in words if found]


def check(words: list[str]) -> None:
    """Parse a command as its program does, without running it."""
    program, rest = words[0], words[1:]
    if program == "ds-sparse-ring":
        if rest[0] == "bench":
            benchmark = typer.Typer()
            benchmark.command()(importlib.import_module(f"ds_sparse_ring.bench.{rest[1]}").main)
            check_typer(benchmark, rest[2:])
        else:
            group: Any = typer.main.get_command(cli.app)
            group.commands[rest[0]].make_context(rest[0], rest[1:])
    elif program == "deepspeed":
        launched = runner.parse_args(rest)
        if launched.user_script.startswith("train/"):
            check(["python", launched.user_script, *launched.user_args])
    elif program == "make":
        target = re.compile(rf"^{rest[0]}:", re.MULTILINE)
        assert target.search((ROOT / "Makefile").read_text(encoding="utf-8")), f"make {rest[0]}"
    elif rest[:2] == ["-m", "ds_sparse_ring.eval"]:
        check_typer(evaluation.app, rest[2:])
    elif rest[:2] == ["-m", ds_to_universal.__name__]:
        check_argparse(ds_to_universal.parse_arguments, rest[2:])
    elif rest[0] == "train/prepare_data.py":
        check_typer(prepare_data.app, rest[1:])
    else:
        module = rest[1] if rest[0] == "-m" else "ds_sparse_ring." + rest[0].removesuffix(".py").replace("/", ".")
        check_argparse(importlib.import_module(module).main, rest[2:] if rest[0] == "-m" else rest[1:])


def check_typer(app: typer.Typer, words: list[str]) -> None:
    typer.main.get_command(app).make_context("", words)


def check_argparse(main: Any, words: list[str]) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        unknown = parse(self, words)[1]
        raise Parsed if not unknown else ValueError(f"No such option: {unknown}")

    with patch.object(argparse.ArgumentParser, "parse_known_args", parse_and_stop), pytest.raises(Parsed):
        main()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_have_the_options_that_they_name(page: Path) -> None:
    for words in commands(page):
        if words[0] not in SET_UP:
            check(words)


def test_there_are_commands_to_check() -> None:
    found = {f"{page.name} {words[0]}" for page in PAGES for words in commands(page)}
    assert {"README.md deepspeed", "README.md ds-sparse-ring", "packing.md python", "evaluation.md python"} <= found


@pytest.mark.parametrize(
    "line",
    [
        "ds-sparse-ring plan --sequence 128K",
        "ds-sparse-ring bench kernel --sparsity 5",
        "deepspeed --gpus 2 train/pretrain.py",
        "deepspeed train/pretrain.py --deepspeed x.json --model y --length 5",
        "python train/prepare_data.py corpus --output data --rows 5",
        "python -m ds_sparse_ring.eval --model x --task ruler --lengths 8K --no-such 1",
        "python train/compare_attention.py --fetch",
    ],
)
def test_an_option_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises((Exception, SystemExit)) as found:
        check(shlex.split(line))
    assert not isinstance(found.value, Parsed | AssertionError)
