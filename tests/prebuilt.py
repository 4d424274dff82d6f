"""``make test-prebuilt``: DS_BUILD_OPS=1 builds the ops into the package, and they are found there, not compiled again.

Installs into a folder of its own, from a copy of the sources, with the packages of the running environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHECK = """
import torch
import ds_sparse_ring
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import FullIndex
from ds_sparse_ring.kernels import Work, get_kernel
from ds_sparse_ring.layout import BlockMap
from ds_sparse_ring.op_builder import CPUAttentionBuilder

assert ds_sparse_ring.__file__.startswith({site!r}), ds_sparse_ring.__file__
builder = CPUAttentionBuilder()
assert builder.is_prebuilt()
assert builder.load().__file__.startswith({site!r}), builder.load().__file__
kernel = get_kernel("auto")
assert kernel.name == "cpu"
q, k, v = torch.randn(2, 128, 16), torch.randn(1, 128, 16), torch.randn(1, 128, 16)
o, lse = torch.zeros_like(q), torch.full((2, 128), float("-inf"))
index = FullIndex(make_segments([128], 2, None), 2)
kernel.forward(q, k, v, Work(BlockMap(1, 0), BlockMap(1, 0), index, 0.25), o, lse)
expected = torch.nn.functional.scaled_dot_product_attention(q, k.expand(2, -1, -1), v.expand(2, -1, -1), is_causal=True)
torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
print("prebuilt ops: installed, found and right")
"""


def main() -> None:
    """Build, install, run."""
    with tempfile.TemporaryDirectory() as folder:
        source, site, empty = Path(folder, "source"), Path(folder, "site"), Path(folder, "extensions")
        files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
        for name in files.stdout.decode().splitlines():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
        environment = {**os.environ, "DS_BUILD_OPS": "1", "TORCH_EXTENSIONS_DIR": str(empty)}
        install = ["-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--target", str(site), str(source)]
        subprocess.run([sys.executable, *install], check=True, env=environment)
        environment["PYTHONPATH"] = str(site)
        subprocess.run([sys.executable, "-c", CHECK.format(site=str(site))], check=True, env=environment, cwd=folder)
        if empty.exists():
            raise SystemExit(f"an op was compiled again, in {empty}: {list(empty.iterdir())}")


if __name__ == "__main__":
    main()
