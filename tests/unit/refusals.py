"""Something that users get wrong. Its message says what was found, where, and the way out: the tables of test_refused_*.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.transformers import attach
from ds_sparse_ring.runtime import SparseRing
from tests.unit.parity_model import Row, make_batch, tiny_model


class Wrong(NamedTuple):
    """Something that a user does, and what the message must hold."""

    name: str
    do: Callable[[Path], Any]
    where: str
    what: str
    way_out: str

    def check(self, folder: Path) -> None:
        """Do it, and read the message."""
        with pytest.raises(SparseRingError) as refusal:
            self.do(folder)
        message = str(refusal.value)
        for part in (self.where, self.what, self.way_out):
            assert part in message, f"{part!r} is missing: {message}"
        assert "pydantic" not in message and "Traceback" not in message
        assert len(message) < 1200, "a message, not a dump"


def written(path: Path, text: str | bytes, name: str = "file.json") -> Path:
    (path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return path / name


def ring(**values: Any) -> SparseRing:
    return SparseRing(SparseRingConfig(backend="torch", segment_tokens=128, **values))


def train(owner: SparseRing, **arguments: Any) -> Any:
    """A forward pass as a training loop has it."""
    model = tiny_model().train()
    attach(model, owner)
    return model(**{**owner.sequence_batch(make_batch([Row((70,))], 1)), **arguments})
