"""The version check: one set of ranges, clear messages, and an import that stays light."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ds_sparse_ring import versions
from ds_sparse_ring.versions import SUPPORTED, Installed, UnsupportedVersionError, check_versions

ROOT = Path(__file__).parents[2]


def test_setup_cfg_declares_the_ranges_that_are_checked() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    declared = {r.name: r.specifier for r in map(Requirement, setup["options"]["install_requires"].split())}
    for name, supported in SUPPORTED.items():
        assert declared[name] == SpecifierSet(supported)


def test_what_is_installed_here_is_supported() -> None:
    check_versions()


@pytest.mark.parametrize(
    ("name", "found", "ok"),
    [
        ("torch", "2.10.1", False),
        ("torch", "2.11.0", True),
        ("torch", "2.11.0a0+5e3f1c2.nv26", True),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.14.0", True),
        ("torch", "3.0.0", False),
        ("deepspeed", "0.19.7", False),
        ("deepspeed", "0.19.8", True),
        ("deepspeed", "0.19.8+unknown", True),
        ("deepspeed", "0.20.0", False),
        ("deepspeed", "0.20.0.dev1", False),
        ("transformers", "5.16.9", False),
        ("transformers", "5.17.0", True),
        ("transformers", "5.24.0", True),
        ("transformers", "6.0.0", False),
        ("accelerate", "1.14.0", False),
        ("accelerate", "1.15.0", True),
        ("accelerate", None, False),
    ],
)
def test_the_ranges(name: str, found: str | None, ok: bool) -> None:
    assert Installed(name, found, SUPPORTED[name]).ok is ok


def test_the_message_names_version_range_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.13.0", "deepspeed": "0.18.0", "transformers": None, "accelerate": "1.15.0"}
    monkeypatch.setattr(versions, "_found", found.get)
    with pytest.raises(UnsupportedVersionError) as refusal:
        check_versions()
    message = str(refusal.value)
    assert "deepspeed >=0.19.8,<0.20 is needed, but 0.18.0 is installed" in message
    assert "transformers >=5.17,<6 is needed, but it is not installed" in message
    assert 'pip install "deepspeed>=0.19.8,<0.20" "transformers>=5.17,<6"' in message
    assert "torch" not in message and "accelerate" not in message
    assert isinstance(refusal.value, ImportError) and isinstance(refusal.value, ValueError)


def test_importing_the_package_checks_the_versions_and_loads_nothing_heavy() -> None:
    check = """
import importlib.metadata, sys
import ds_sparse_ring
heavy = {"torch", "deepspeed", "transformers", "accelerate", "pydantic", "numpy"} & set(sys.modules)
assert not heavy, heavy
assert {"SparseRing", "SparseRingConfig", "SparseRingTrainer"} <= set(dir(ds_sparse_ring))
assert ds_sparse_ring.SparseRingConfig().degree is None
assert not {"deepspeed", "transformers", "torch"} & set(sys.modules)
try:
    ds_sparse_ring.SparseRong
except AttributeError as error:
    assert "SparseRong" in str(error)
else:
    raise AssertionError("an unknown name was found")
for name in [name for name in sys.modules if name.startswith("ds_sparse_ring")]:
    del sys.modules[name]
importlib.metadata.version = lambda name: "0.1"
try:
    import ds_sparse_ring
except ImportError as error:
    assert "0.1 is installed" in str(error), error
else:
    raise AssertionError("the import did not check the versions")
"""
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)


def test_the_names_of_the_package_exist() -> None:
    import ds_sparse_ring

    for name in ds_sparse_ring.__all__:
        assert getattr(ds_sparse_ring, name).__name__ == name
