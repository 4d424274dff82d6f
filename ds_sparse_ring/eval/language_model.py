"""The model as lm-eval sees it."""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ds_sparse_ring.integrations.tiled_loss import tiled_loss_sum

_TILE_TOKENS = 4096


class LongTextLM(HFLM):
    """lm-eval's class for models of Transformers; log-likelihoods of long texts need no logits of all their tokens at once."""

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Of each text, the sum over its tokens, in windows of the model's length that do not share targets."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
            found.append(sum(self._of_window(*make_disjoint_window(window)) for window in windows))
        return found

    @torch.no_grad()
    def _of_window(self, context: list[int], continuation: list[int]) -> float:
        ids = torch.tensor([*context, *continuation], device=self.device)
        model: Any = self.model
        hidden = model.get_decoder()(input_ids=ids[None, :-1], use_cache=False).last_hidden_state[0]
        targets = ids[1:].clone()
        targets[: len(context) - 1] = -100
        return -float(tiled_loss_sum(hidden, targets, model.get_output_embeddings(), _TILE_TOKENS))
