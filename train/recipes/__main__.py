"""Write the files of all recipes and README.md with what each takes."""

from __future__ import annotations

from ds_sparse_ring.estimate import estimate
from ds_sparse_ring.train.recipes import DENSITY, FOLDER, RECIPES, Recipe, text_of
from ds_sparse_ring.units import GIB

_HEAD = f"""# Recipes

Continue to train a model on sequences longer than it was made for. Hardware: H200 with 141 GB, nodes of eight with 2 TB of
host memory that the job has for itself. Positions are stretched by YaRN (`--yarn_from`: the length they are stretched from, in
Llama-3.1 the 8192 that its frequencies start from, as in UltraLong, 2504.06214). Tokenize and pack first, for 512K tokens
and for 1M:

```bash
python train/prepare_data.py corpus/ --tokenizer Qwen2.5-3B/ --sequence-tokens {512 << 10} --output data/
python train/prepare_data.py corpus/ --tokenizer Llama-3.1-8B/ --sequence-tokens {1 << 20} --output data/
```

Then one command. On 32 GPUs it starts on one of four nodes that share the folders, have this package at the same place and take
ssh without a password, and reads `hosts`, a line for each node:

```
node1 slots=8
node2 slots=8
node3 slots=8
node4 slots=8
```

GiB are of each GPU, as `ds-sparse-ring plan` counts them at the {DENSITY:.1%} density that all of them hold: predicted, not
measured; 1 to 3 GiB of CUDA and NCCL come on top. Seconds are simulated, and leave out what DeepSpeed's offloaded optimizer
takes.

| recipe | GPU GiB | host GiB | step s | tokens/s |
|---|---|---|---|---|
"""


def row(recipe: Recipe) -> str:
    """Its line of the table."""
    e = estimate(recipe.job(), recipe.schedule())
    device, host = (nbytes / GIB for nbytes in (e.memory.device, e.memory.host))
    link = f"[{recipe.name}]({recipe.name}.json)"
    return f"| {link} | {device:.0f} | {host:.0f} | {e.step_ms / 1e3:.1f} | {recipe.tokens / e.step_ms * 1e3:.0f} |"


def readme() -> str:
    """README.md of this folder."""
    commands = "\n".join(recipe.command() for recipe in RECIPES)
    return _HEAD + "\n".join(map(row, RECIPES)) + f"\n\n```bash\n{commands}\n```\n"


def main() -> None:
    """Write all."""
    for recipe in RECIPES:
        recipe.path.write_text(text_of(recipe), encoding="utf-8")
    (FOLDER / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
