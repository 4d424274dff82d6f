"""README, CONTRIBUTING and docs/: links lead somewhere, settings are complete, and what users import has docstrings.

That the code of the how-to pages runs is shown by test_how_to.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from ds_sparse_ring import config
from ds_sparse_ring.cli import app
from ds_sparse_ring.config import SparseRingConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "train/recipes/README.md", *sorted(DOCS.rglob("*.md"))]
MODULES = (DOCS / "modules.txt").read_text().split()

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in _FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not link.startswith("https://")]


def test_links_lead_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_the_index_has_every_page_and_the_readme_every_how_to() -> None:
    listed = {(DOCS / link).resolve() for link in links(DOCS / "README.md")}
    assert set(DOCS.rglob("*.md")) - {DOCS / "README.md"} <= listed
    linked = {(ROOT / link).resolve() for link in links(ROOT / "README.md")}
    assert set((DOCS / "how-to").glob("*.md")) <= linked


def test_the_measurements_begin_with_a_line_for_each_section() -> None:
    contents, *sections = re.split(r"^## ", prose(DOCS / "measurements.md"), flags=re.MULTILINE)
    titles = [section.splitlines()[0] for section in sections]
    assert re.findall(r"^\| \[(.+)\]\(#\S+\) \| .+ \|$", contents, re.MULTILINE) == titles and len(titles) > 10


def test_every_key_of_the_configuration_is_on_its_page() -> None:
    text = prose(DOCS / "configuration.md")
    models = [x for x in vars(config).values() if isinstance(x, type) and issubclass(x, BaseModel) and x.model_fields]
    assert SparseRingConfig in models and len(models) > 10
    missing = []
    for model in models:
        kind = model.model_fields.get("kind")
        where = text if kind is None else re.findall(rf"^\| `{kind.default}` \|.*$", text, re.MULTILINE)[0]
        names = [model.__name__[: -len("Config")].lower() + "." + name for name in model.model_fields]
        for name, dotted in zip(model.model_fields, names, strict=True):
            if name != "kind" and f"`{name}`" not in where and f"`{dotted}`" not in where:
                missing.append(f"{model.__name__}.{name}")
    assert not missing


def test_json_of_the_pages_is_accepted() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page, "json")]
    assert len(found) >= 4
    for page, block in found:
        section = json.loads("{" + block + "}")
        try:
            SparseRingConfig(**section.get("sparse_ring", section))
        except ValueError as error:
            raise AssertionError(f"{page.relative_to(ROOT)}: {error}") from error


def test_commands_that_plan_run_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = {line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()}
    commands = [line for line in lines if line.startswith("ds-sparse-ring plan") and "--compare" not in line]
    assert len(commands) >= 2
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
        assert result.exit_code == 0 and "device memory: " in result.output, result.output


@pytest.mark.parametrize("page", ["when-it-hangs.md", "when-memory-runs-out.md"])
def test_messages_that_a_page_explains_are_those_of_the_code(page: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "ds_sparse_ring").rglob("*.py"))
    sources = re.sub(r'"\s*f?"', "", sources)  # literals that stand one after the other are one
    table = re.search(r"^\| (?:in the )?message \|.*?\n\n", prose(DOCS / "how-to" / page), re.DOTALL | re.MULTILINE)
    assert table is not None
    quoted = [message for row in table[0].strip().splitlines()[2:] for message in re.findall("`([^`]+)`", row.split("|")[1])]
    pieces = [piece.strip() for message in quoted for piece in re.split(r"\(?\.\.\.\)?", message) if piece.strip()]
    theirs = {"CUDA out of memory"}
    assert len(pieces) > 5 and not [piece for piece in pieces if piece not in sources and piece not in theirs]


def test_what_the_pages_import_is_in_the_reference() -> None:
    imports = re.compile(r"^from (ds_sparse_ring\S*) import (.+)$", re.MULTILINE)
    code = [block for page in PAGES for block in blocks(page, "python")]
    found = [match for block in code for match in imports.findall(block)]
    assert len(found) > 20 and {module for module, _ in found} <= set(MODULES)
    for module, names in found:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    for block in blocks(ROOT / "README.md", "python"):
        compile(block, "README.md", "exec")


def public(module: ModuleType) -> dict[str, object]:
    """Classes and functions that a module defines, or names in ``__all__``."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return {name: getattr(module, name) for name in names}
    return {
        name: x
        for name, x in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(x) or inspect.isfunction(x)) and x.__module__ == module.__name__
    }


def documented(owner: type, method: str) -> bool:
    """Whether a method has a docstring, or the one that it overrides (for a mixin: in what it is mixed with), or the one of a
    protocol of its module."""
    around = vars(importlib.import_module(owner.__module__)).values()
    protocols = [x for x in around if isinstance(x, type) and getattr(x, "_is_protocol", False)]
    classes = {base for each in (owner, *owner.__subclasses__(), *protocols) for base in each.__mro__}
    return any(getattr(vars(base).get(method), "__doc__", None) for base in classes)


def is_method(x: object) -> bool:
    return inspect.isfunction(x) or isinstance(x, property | classmethod | staticmethod)


def test_every_public_name_of_the_reference_has_a_docstring() -> None:
    missing = []
    for module in map(importlib.import_module, MODULES):
        missing += [] if module.__doc__ else [module.__name__]
        for name, x in public(module).items():
            missing += [] if x.__doc__ else [f"{module.__name__}.{name}"]
            if isinstance(x, type):
                methods = [key for key, value in vars(x).items() if is_method(value) and not key.startswith("_")]
                missing += [f"{module.__name__}.{name}.{key}" for key in methods if not documented(x, key)]
    assert not missing
