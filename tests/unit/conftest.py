"""Fixtures of several files of tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text/, a tokenizer and a model with fresh weights in model/, and rows of the text in data/."""
    from .corpus import make_corpus  # DeepSpeed is imported when tests/conftest.py has said on what it runs

    return make_corpus(tmp_path_factory.mktemp("corpus"))
