"""Liger's kernels are asked for by people who have not installed them; what they compute is tested on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
from torch import nn

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.liger import use_liger_kernels


def test_without_liger_the_message_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SparseRingError, match="pip install liger-kernel"):
        use_liger_kernels(nn.Linear(2, 2))
