"""The JSON file of a benchmark: what ran on what, with which versions, and the figures."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from ds_sparse_ring import __version__


def device_name(device: torch.device | str) -> str:
    """Of the GPU, or of the processor."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def write_result(output: Path, device: torch.device | str, fields: dict[str, Any]) -> None:
    """Write ``fields`` behind device and versions; folders are made."""
    versions = {"ds_sparse_ring": __version__, "torch": torch.__version__, "python": platform.python_version()}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"device": device_name(device), "versions": versions, **fields}, indent=1))
