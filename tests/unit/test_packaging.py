"""What setup.cfg says about the tree: every package is listed, and mapped folders are found where they belong."""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPPED = {
    "ds_sparse_ring.op_builder": "op_builder",
    "ds_sparse_ring.ds_configs": "ds_configs",
    "ds_sparse_ring.train": "train",
}


@pytest.fixture(scope="module")
def options() -> configparser.SectionProxy:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["options"]


def test_every_package_of_the_tree_is_listed(options: configparser.SectionProxy) -> None:
    found = {
        ".".join([base, *init.parent.relative_to(ROOT / folder).parts])
        for base, folder in {"ds_sparse_ring": "ds_sparse_ring", **MAPPED}.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(options["packages"].split()) == found


@pytest.mark.parametrize(("package", "folder"), MAPPED.items())
def test_a_mapped_folder_is_imported_as_part_of_the_package(package: str, folder: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == (ROOT / folder).resolve()


def test_a_wheel_has_all_files_and_no_top_level_op_builder(tmp_path: Path) -> None:
    # A copy: setuptools leaves a build folder beside the sources.
    tracked = ["setup.cfg", "pyproject.toml", "LICENSE", "ds_sparse_ring", *MAPPED.values()]
    for name in tracked:
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"ds_sparse_ring/{path.relative_to(ROOT / 'ds_sparse_ring')}" for path in _sources("ds_sparse_ring")}
    for folder in MAPPED.values():
        expected |= {f"ds_sparse_ring/{folder}/{path.relative_to(ROOT / folder)}" for path in _sources(folder)}
    assert expected <= names, sorted(expected - names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"ds_sparse_ring"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_command_is_installed() -> None:
    (command,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "ds-sparse-ring"]
    assert command.value == "ds_sparse_ring.cli:app"
    assert callable(command.load())


def test_deepspeed_does_not_take_our_op_builder_for_its_own() -> None:
    # Run from the root of the repository, where "import op_builder" would find our folder.
    check = "from deepspeed.accelerator import get_accelerator as a; print(a().op_builder_dir())"
    result = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1].startswith("deepspeed.ops.op_builder")


def _sources(folder: str) -> list[Path]:
    return [path for pattern in ("*.py", "*.json", "py.typed") for path in (ROOT / folder).rglob(pattern)]
