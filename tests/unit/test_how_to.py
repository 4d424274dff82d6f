"""The pages of docs/how-to: their Python runs as it stands, from top to bottom, and so does the command of packing.

That the other commands have the options that they name is shown by test_documented_commands.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from typer.testing import CliRunner

from ds_sparse_ring.train import prepare_data
from tests.common import DistributedTest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "how-to"

RUN = ["lora.md", "megatron-style-model.md", "own-loop.md", "own-trainer-script.md", "packing.md", "when-it-hangs.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def workplace(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: corpus/, model/ and ds_configs/; data/ is made by a command of theirs."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, place in {"corpus": corpus / "text", "model": corpus / "model", "ds_configs": ROOT / "ds_configs"}.items():
        shutil.copytree(place, folder / name)
    (command,) = blocks("packing.md", "bash")
    python, script, *options = shlex.split(command)
    assert (python, script) == ("python", "train/prepare_data.py") and (ROOT / script).is_file()
    here = os.getcwd()
    try:
        os.chdir(folder)
        result = CliRunner().invoke(prepare_data.app, options)
    finally:
        os.chdir(here)
    assert result.exit_code == 0, result.output
    return folder


def test_all_pages_with_code_are_run_here() -> None:
    with_code = {page.name for page in PAGES.glob("*.md") if blocks(page.name, "python")}
    assert with_code == {*RUN, "evaluation.md"}


def test_evaluation_continues_a_script_of_the_readers(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "ds_configs" / "zero3.json", tmp_path / "ds.json")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(workplace / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(workplace / "model")
    (block,) = blocks("evaluation.md", "python")
    with patch.object(model, "generate", wraps=model.generate) as generate:
        exec(compile(block, "evaluation.md", "exec"), {"model": model, "tokenizer": tokenizer, "text": "a prompt " * 40})
    assert generate.call_args.kwargs["max_new_tokens"] == 64 and generate.call_args.kwargs["input_ids"].shape[0] == 1


class TestPages(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("page", RUN)
    def test_a_page_runs_as_it_stands(self, page: str, workplace: Path, tmp_path: Path) -> None:
        if page == "lora.md":
            pytest.importorskip("peft")
        if dist.get_rank() == 0:
            for part in workplace.iterdir():
                (tmp_path / part.name).symlink_to(part)
        dist.barrier()
        here, names = os.getcwd(), {"__name__": "page"}
        found: dict[str, Any] = names
        try:
            os.chdir(tmp_path)
            for block in blocks(page, "python"):
                exec(compile(block, page, "exec"), found)
        finally:
            os.chdir(here)
        if page == "lora.md":
            assert (tmp_path / "out" / "adapters" / "adapter_config.json").is_file()
        if page == "megatron-style-model.md":
            assert found["engine"].global_steps == 2 and torch.isfinite(found["loss_sum"])
        if page in ("own-loop.md", "own-trainer-script.md"):
            dist.barrier()
            found.pop("in_force", None)
            unset_hf_deepspeed_config()
            AutoTokenizer.from_pretrained(tmp_path / "model")
            trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").state_dict()
            before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
            assert any(not torch.equal(trained[name].float(), before[name].float()) for name in before)
