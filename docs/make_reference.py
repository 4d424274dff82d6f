"""The API reference from docstrings, as HTML: ``make docs``, or ``python docs/make_reference.py FOLDER`` with pdoc installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pdoc
import pdoc.render

import ds_sparse_ring


def main(folder: Path) -> None:
    """Write one page for each module of modules.txt."""
    for name in ds_sparse_ring.__all__:  # loaded when first used, and pdoc takes only what is there
        setattr(ds_sparse_ring, name, getattr(ds_sparse_ring, name))
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*(Path(__file__).parent / "modules.txt").read_text().split(), output_directory=folder)
    print(f"written: {folder}/index.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
