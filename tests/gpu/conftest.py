"""Fixtures of the tests that need a GPU."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gradients repeat bit for bit; without it the CUDA kernels add those of queries in any order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
