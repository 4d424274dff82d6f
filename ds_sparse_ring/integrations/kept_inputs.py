"""Inputs of layers in chunks, kept for the backward pass or made again there (see `chunked_layers`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.integrations.chunked_call import LayerCall, leaf
from ds_sparse_ring.spill import Spilled


@dataclass(eq=False)
class KeptInput:
    """What the graph owns of a call: the slot and the input, maybe outside the device. Both go when the graph lets go of it.

    Of ``layer_inputs_every`` layers in a row only the first one keeps its input. The first one to run backward, the last of
    them, makes the others' inputs again, which then wait on the device for their own layers.

    Attributes:
        wants_dx: whether the input has a gradient. before: the layer from which the input is made; None: it is kept.
        x: the kept input. made: the input that a later layer has made. output: address of the output.
    """

    call: LayerCall
    replay: AbstractContextManager[None]
    wants_dx: bool
    before: KeptInput | None
    x: Tensor | Spilled | None = None
    made: Tensor | None = None
    output: int = 0

    def keep(self, x: Tensor) -> KeptInput:
        """What autograd saves in place of the input."""
        spill = self.call.context.spill
        if self.before is None:
            self.x = x.detach() if spill is None else spill.saved_tensors().pack_hook(x)
        return self

    def take(self) -> Tensor:
        """The input ``[1, n, W]``, for this layer's backward pass."""
        if self.before is None:
            return self._input(last=True)
        if self.made is None:  # also in the second pass over a graph that is kept
            self._make()
        x, self.made = self.made, None
        assert x is not None
        return x

    def _make(self) -> None:
        """Inputs of this layer and of those between it and the one that has kept its own."""
        layers = [self]
        while (before := layers[-1].before) is not None:
            layers.append(before)
        x = layers[-1]._input(last=False)
        for kept, following in pairwise(reversed(layers)):
            following.made = x = kept._forward_again(x)

    def _input(self, *, last: bool) -> Tensor:
        assert self.x is not None
        return self.x.take(last=last)[0] if isinstance(self.x, Spilled) else self.x.detach()

    def _forward_again(self, x: Tensor) -> Tensor:
        """x -> y, both ``[1, n, W]``. The module is called: ZeRO-3's hooks gather its parameters, in an order that they learn."""

        def forward() -> Tensor:
            with torch.no_grad(), self.replay:
                return self.call.forward(x)

        # These hooks count the inputs with a gradient anew in each forward pass, and the layer's backward pass counts them down.
        with torch.enable_grad():
            y: Tensor = nn.Module.__call__(self.call.layer, leaf(x, self.wants_dx), again=forward)
        return y.detach()


def layer_before(layer: Any, x: Tensor, context: SequenceContext) -> KeptInput | None:
    """The layer from which this one's input is made again; None: it keeps its input."""
    every, number, kept = context.config.layer_inputs_every, layer.self_attn.layer_idx, context.latest.get()
    if number % every == 0 or kept is None or kept.call.layer.self_attn.layer_idx + 1 != number:
        return None
    if x.data_ptr() != kept.output:
        raise SparseRingError(
            f"sparse_ring.layer_inputs_every = {every}: the input of layer {number} is not what layer {number - 1} returned, and "
            "the backward pass would make it again from there: remove the hook or code between the layers that changes it, or "
            "leave layer_inputs_every out"
        )
    return cast(KeptInput, kept)
