"""Recipes: the files are those that are tested here, what they ask for fits, and positions are stretched completely."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from typer.testing import CliRunner

from ds_sparse_ring.cli import app
from ds_sparse_ring.config import SparseRingConfig
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.job import schedules
from ds_sparse_ring.train.model import set_yarn
from ds_sparse_ring.train.recipes import FOLDER, RECIPES, Recipe, text_of
from ds_sparse_ring.train.recipes.__main__ import readme


def test_the_files_are_what_the_recipes_say() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {recipe.name for recipe in RECIPES}
    for recipe in RECIPES:
        assert recipe.path.read_text() == text_of(recipe), "python -m ds_sparse_ring.train.recipes writes them anew"
    assert (FOLDER / "README.md").read_text() == readme(), "python -m ds_sparse_ring.train.recipes writes it anew"


def test_each_model_and_length_has_a_recipe_for_each_number_of_gpus() -> None:
    wanted = {("qwen2.5-3b", "512k"), ("llama-3.1-8b", "512k"), ("llama-3.1-8b", "1m"), ("qwen3-8b", "512k")}
    found = {(recipe.model, recipe.length, recipe.gpus) for recipe in RECIPES}
    assert found == {(*each, gpus) for each in wanted for gpus in (1, 2, 8, 32)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_fits_with_room_to_spare_and_is_as_fast_as_any_that_does(recipe: Recipe, tmp_path: Path) -> None:
    job, schedule = recipe.job(), recipe.schedule()
    own = estimate(job, schedule)
    gib = job.hardware.memory_gib * 2**30
    assert schedule in schedules(job) and not own.memory.misfits(job.hardware)
    assert own.memory.device < 0.93 * gib, "CUDA, NCCL and fragments need the rest"
    assert own.memory.recomputed == 0, "all outputs have room"
    others = [estimate(job, other) for other in schedules(job)]
    fastest = min(other.step_ms for other in others if other.memory.device < 0.93 * gib)
    assert own.step_ms < 1.05 * fastest
    (tmp_path / "node.json").write_text(job.hardware.model_dump_json())
    options = f"--model {recipe.model} --seq {recipe.length} --world {recipe.gpus} --hardware {tmp_path / 'node.json'}"
    result = CliRunner().invoke(app, ["plan", "--config", str(recipe.path), *options.split()])
    assert result.exit_code == 0 and "fastest that fits" in result.output, result.output
    assert SparseRingConfig.from_deepspeed(recipe.path).layer_chunk_tokens == 16384


class TestYarn:
    def test_all_keys_are_set_and_survive_config_json(self, tmp_path: Path) -> None:
        config = Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=32768)
        set_yarn(config, original_tokens=32768, tokens=524288)
        config.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())
        assert saved["max_position_embeddings"] == 524288
        assert saved["rope_parameters"] == {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32768,
        }  # fmt: skip
        rotary = Qwen2RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
        plain = Qwen2RotaryEmbedding(Qwen2Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
        share = plain.inv_freq / rotary.inv_freq
        assert share[0] == pytest.approx(1) and share[-1] == pytest.approx(16), "slow frequencies are stretched, fast ones stay"

    def test_llama3_frequencies_keep_their_bounds(self) -> None:
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        parameters = {**llama3, "original_max_position_embeddings": 8192, "rope_theta": 5e5}
        config = LlamaConfig(rope_parameters=parameters, max_position_embeddings=131072, hidden_size=512, num_attention_heads=4)
        before = LlamaRotaryEmbedding(config).inv_freq
        set_yarn(config, original_tokens=8192, tokens=65536)
        after = LlamaRotaryEmbedding(config).inv_freq
        torch.testing.assert_close(before[[0, -1]], after[[0, -1]], rtol=1e-5, atol=0)
        assert (before / after).max() < 3, "in between the two blend differently"

    def test_nothing_to_stretch_is_refused(self) -> None:
        with pytest.raises(SparseRingError, match="cannot stretch 4096 tokens to 4096"):
            set_yarn(Qwen2Config(), original_tokens=4096, tokens=4096)

    def test_a_model_without_rotary_positions_is_refused(self) -> None:
        with pytest.raises(SparseRingError, match="GPT2Config has no rope_parameters .*leave --yarn_from out"):
            set_yarn(GPT2Config(), original_tokens=1024, tokens=4096)

    def test_a_model_whose_config_json_loses_a_key_is_refused(self) -> None:
        class Forgetful(Qwen2Config):
            def to_dict(self) -> dict[str, Any]:
                return {key: value for key, value in super().to_dict().items() if key != "max_position_embeddings"}

        with pytest.raises(SparseRingError, match=r"Forgetful keeps .*and 32768 of .*and 65536: leave --yarn_from out"):
            set_yarn(Forgetful(), original_tokens=32768, tokens=65536)
