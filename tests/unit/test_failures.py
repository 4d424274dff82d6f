"""docs/failures.md: every test that it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .test_refused_configurations import CONFIGURATIONS
from .test_refused_inputs import INPUTS
from .test_refused_models import MODELS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
TABLES = {"configurations": CONFIGURATIONS, "inputs": INPUTS, "models": MODELS}
REFERENCE = re.compile(r"`((?:gpu/)?test_\w+\.py)::(test_\w+)(?:\[([^\]]+)\])?`")


def named_tests() -> list[tuple[str, str, str]]:
    """File, function and case of each test on the page."""
    return [(match[1], match[2], match[3] or "") for match in REFERENCE.finditer(PAGE.read_text(encoding="utf-8"))]


def functions(file: str) -> set[str]:
    path = ROOT / "tests" / (file if file.startswith("gpu/") else f"unit/{file}")
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_page_names_is_there() -> None:
    cases = {(f"test_refused_{kind}.py", wrong.name) for kind, table in TABLES.items() for wrong in table}
    for file, function, case in named_tests():
        assert function in functions(file), f"{file}::{function}"
        assert not case or (file, case) in cases, f"{file}::{function}[{case}]"


def test_every_line_of_the_page_names_a_test() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not line.startswith("| what goes wrong")]
    assert len(lines) == 43 and all(REFERENCE.search(line.rsplit(" | ", 1)[1]) for line in lines)
