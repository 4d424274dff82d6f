"""Triton kernels compile for Hopper and fit its shared memory; no GPU is needed for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("kernels", ["attention", "selection"])
def test_kernels_compile_for_hopper_and_fit_its_shared_memory(kernels: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script), kernels], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
