"""The API reference from docstrings, as HTML: ``make docs``, or ``python docs/make_reference.py FOLDER`` with pdoc installed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pdoc
import pdoc.render

import ds_sparse_ring


def main(folder: Path) -> None:
    """Write one page for each module of modules.txt."""
    modules = (Path(__file__).parent / "modules.txt").read_text().split()
    for name in modules:
        resolve_named_tuples(importlib.import_module(name))
    for name in ds_sparse_ring.__all__:  # loaded when first used, and pdoc takes only what is there
        setattr(ds_sparse_ring, name, getattr(ds_sparse_ring, name))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*modules, output_directory=folder)
    print(f"written: {folder}/index.html")


def resolve_named_tuples(module: ModuleType) -> None:
    """Evaluate the types of fields: pdoc looks for their names where Python has made the constructor, not in the module."""
    for x in vars(module).values():
        if isinstance(x, type) and issubclass(x, tuple) and hasattr(x, "_fields") and x.__module__ == module.__name__:
            constructor: Any = x.__new__
            constructor.__annotations__ = get_type_hints(x)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
