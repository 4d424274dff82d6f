"""What the builders of this package share: where sources are, prebuilt modules, the cache's key and its lock.

DeepSpeed's own `load` knows only ops of DeepSpeed and its JIT resolves sources below DeepSpeed's folder; ours resolves them here.
The extension cache has no key of its own once ``TORCH_EXTENSIONS_DIR`` is set, and its lock is a file that a killed build leaves
behind, on which the next one waits for ever. Here the folder's name carries the key, and a lock of the operating system, which
ends with its process, is held around the build: a lock file found under it has no owner any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.utils import logger

CSRC = Path(__file__).resolve().parent.parent / "ds_sparse_ring" / "csrc"
if not CSRC.is_dir():  # installed: this folder lies inside the package
    CSRC = Path(__file__).resolve().parent.parent / "csrc"


class SparseRingOpBuilder(OpBuilder):
    """Mixin in front of one of DeepSpeed's builders. Subclasses name the op and its files.

    Attributes:
        NAME: the op's name in reports. SOURCES: files below ``csrc``. BUILD_VAR: environment variable that, set to 0, leaves
            the op out of ``DS_BUILD_OPS=1``. HAS_STAND_IN: kernels that need no compiler do the op's work where it is missing, so
            that ``DS_BUILD_OPS=1`` leaves it out by itself where it cannot be built.
    """

    NAME: str
    BUILD_VAR: str
    SOURCES: tuple[str, ...]
    HAS_STAND_IN = False

    def __init__(self) -> None:
        super().__init__(name=f"{self.NAME}_{environment_key()}")

    def absolute_name(self) -> str:
        """Name of the prebuilt module."""
        return f"ds_sparse_ring.{self.NAME}_prebuilt"

    def sources(self) -> list[str]:
        """Absolute paths for the JIT; relative ones, as setuptools wants them, for building ahead of time."""
        paths = [CSRC / source for source in self.SOURCES]
        return [str(path) if self.jit_mode else str(path.relative_to(CSRC.parent.parent)) for path in paths]

    def include_paths(self) -> list[str]:
        """Folders of the headers."""
        return sorted({str((CSRC / source).parent) for source in self.SOURCES})

    def is_prebuilt(self) -> bool:
        """Whether the package was installed with this op in it."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def is_available(self) -> bool:
        """Whether `load` has, or may be expected to make, a module that runs here."""
        return self.is_prebuilt() or self.is_compatible()

    def is_buildable(self, verbose: bool = False) -> bool:
        """Whether the op can be compiled here ahead of time; if not, ``error_log`` says why."""
        return self.is_compatible(verbose)

    def load(self, verbose: bool = False) -> Any:
        """The op's module: prebuilt if there is one, else compiled now or found in the cache.

        Raises:
            RuntimeError: it cannot be compiled here; the message says why.
        """
        if self.name in OpBuilder._loaded_ops:
            return OpBuilder._loaded_ops[self.name]
        if self.is_prebuilt():
            module = importlib.import_module(self.absolute_name())
            OpBuilder._loaded_ops[self.name] = module
            return module
        with self._build_lock():
            return self.jit_load(verbose)

    @contextmanager
    def _build_lock(self) -> Iterator[None]:
        from torch.utils.cpp_extension import _get_build_directory

        folder = Path(_get_build_directory(self.name, verbose=False))
        with open(folder / "build.flock", "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # other ranks wait here while one builds
            stale = folder / "lock"
            if stale.exists():
                logger.warning(f"removing {stale}: the process that was building {self.NAME} has died")
                stale.unlink()
            yield


def environment_key() -> str:
    """Python, torch and processor as part of an identifier, so that one cache folder serves several environments."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    versions = "".join(c if c.isalnum() else "_" for c in torch.__version__)
    processor = hashlib.sha256(f"{platform.machine()} {_processor_flags()}".encode()).hexdigest()[:8]
    return f"{python}_torch{versions}_{processor}"


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
