"""Builds the compiled kernels ahead of time when asked to: ``DS_BUILD_OPS=1 pip install --no-build-isolation .``

Everything else about the package stands in setup.cfg. As in DeepSpeed, an op's own variable (its builder's BUILD_VAR) set to 0
leaves it out. What has a stand-in is left out by itself where it cannot be built, unless its variable is 1.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent


def compiled_ops() -> dict:
    """Arguments of ``setup`` for the ops to build."""
    if os.environ.get("DS_BUILD_OPS", "0") != "1":
        return {}
    try:
        import deepspeed  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise SystemExit(
            f"DS_BUILD_OPS=1 compiles against the installed torch and DeepSpeed, but {error}: install both, then "
            "DS_BUILD_OPS=1 pip install --no-build-isolation ."
        ) from None
    sys.path.insert(0, str(ROOT))
    import ds_sparse_ring

    ds_sparse_ring.__path__.append(str(ROOT))  # where op_builder/ lies before it is installed into the package
    from torch.utils.cpp_extension import BuildExtension

    from ds_sparse_ring.op_builder import ALL_BUILDERS

    modules = []
    for builder in (make() for make in ALL_BUILDERS):
        wanted = os.environ.get(builder.BUILD_VAR)
        if wanted == "0":
            continue
        if not builder.is_buildable(verbose=True):
            if builder.HAS_STAND_IN and wanted is None:
                continue
            raise SystemExit(f"{builder.NAME} cannot be built here: {builder.error_log}. Leave it out with {builder.BUILD_VAR}=0")
        modules.append(builder.builder())
    return {"ext_modules": modules, "cmdclass": {"build_ext": BuildExtension}}


setup(**compiled_ops())
