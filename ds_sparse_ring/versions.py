"""The versions of the libraries whose internals this package relies on, checked when it is imported.

The package relies on hooks of DeepSpeed, Transformers and accelerate. With an unknown version it might train with wrong
gradients instead of failing, so versions outside of these ranges are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_sparse_ring.errors import SparseRingError

SUPPORTED: Mapping[str, str] = {
    "torch": ">=2.11,<3",
    "deepspeed": ">=0.19.8,<0.20",
    "transformers": ">=5.17,<6",
    "accelerate": ">=1.15,<2",
}
"""Ranges per distribution. setup.cfg declares the same ones to pip."""


class UnsupportedVersionError(SparseRingError, ImportError):
    """An installed library is missing or outside the supported range."""


@dataclass(frozen=True)
class Installed:
    """One checked library: its name, the version found (None if it is not installed) and the supported range."""

    name: str
    found: str | None
    supported: str

    @property
    def ok(self) -> bool:
        """Whether the version lies in the range.

        Local builds and pre-releases count as the release that they are named after (2.13.0+cpu and 2.13.0a0 are
        2.13.0): containers with torch ship such versions.
        """
        return self.found is not None and Version(Version(self.found).base_version) in SpecifierSet(self.supported)


def installed_versions() -> list[Installed]:
    """What is installed of the libraries in `SUPPORTED`."""
    return [Installed(name, _found(name), supported) for name, supported in SUPPORTED.items()]


def check_versions() -> None:
    """Check all libraries in `SUPPORTED`.

    Raises:
        UnsupportedVersionError: naming each library outside its range, what is installed, and the pip command.
    """
    wrong = [library for library in installed_versions() if not library.ok]
    if not wrong:
        return
    lines = [
        f"{library.name} {library.supported} is needed, "
        + ("but it is not installed" if library.found is None else f"but {library.found} is installed")
        for library in wrong
    ]
    wanted = " ".join(f'"{library.name}{library.supported}"' for library in wrong)
    raise UnsupportedVersionError(f"ds_sparse_ring cannot be used here: {'; '.join(lines)}. Run: pip install {wanted}")


def _found(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
