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
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def about(device: torch.device | str) -> dict[str, Any]:
    """Device and versions: what every file begins with."""
    versions = {"ds_sparse_ring": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"device": device_name(device), "versions": versions | {"cuda": torch.version.cuda}}


def write_result(output: Path, device: torch.device | str, fields: dict[str, Any]) -> None:
    """Write ``fields`` behind `about`; folders are made."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**about(device), **fields}, indent=1))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
