"""The API reference: a page for each module of docs/modules.txt, and every type on it is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .test_docs import DOCS, MODULES


def test_the_reference_is_complete_and_made_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    command = [sys.executable, str(DOCS / "make_reference.py"), str(tmp_path)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)  # its own: pdoc changes the modules it reads
    assert "UserWarning" not in made.stderr, made.stderr
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html")}
    assert pages == {"index.html", *(f"{module.replace('.', '/')}.html" for module in MODULES)}
    text = (tmp_path / "ds_sparse_ring.html").read_text(encoding="utf-8")
    assert "use_sparse_ring" in text, "names that are loaded when first used"
    assert "numpy.ndarray" in (tmp_path / "ds_sparse_ring" / "run_log.html").read_text(encoding="utf-8")
