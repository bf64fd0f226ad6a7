"""Running the frozen target over packed rows and keeping the features of a few layers.

Legend: R rows, S tokens of a row, K features, H hidden size.

A feature is the output of a decoder layer, before any final norm: `hidden_states[id + 1]` of transformers. transformers
separates packed documents by their positions, which start again at 0, when it gets no attention mask and no cache.
Layers with a running state (linear attention, convolutions, state spaces) do not look at positions and would leak one
document into the next: such targets are refused with packed rows.

Layers may be compiled, each by itself: those of one kind have one code, so Dynamo compiles once for all of them. A row of one
document gets no mask from transformers, a row of several gets one: the first batch is run both ways, so that nothing is left
to compile later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dflash.batch import PackedBatch
from dflash.config import ConfigError
from dflash.modeling.anatomy import text_config, text_decoder
from dflash.modeling.feature_layers import check_layer_ids
from dflash.modeling.tensor_parallel import split

Compiled = Callable[[Callable[..., Any]], Callable[..., Any]]

_LAYERS_WITHOUT_STATE = frozenset({"full_attention", "sliding_attention"})
# Mean relative change of a token's last state that counts as a leak; rounding in bf16 stays below.
_LEAK = 0.1


def supports_packing(model: Any) -> bool:
    """Whether documents in one row are independent in this target. Declared layer kinds first, then a trial of 2 x 8 tokens."""
    kinds = set(getattr(text_config(model), "layer_types", None) or ())
    return kinds <= _LAYERS_WITHOUT_STATE and not _leaks(text_decoder(model))


class TargetRunner:
    """Runs a target up to its last selected layer. Takes the model over: the layers above are removed from it.

    Raises ConfigError on layer ids that are out of range, not ascending, or hold the last layer.
    """

    def __init__(
        self, model: Any, layer_ids: tuple[int, ...], *, keep_final_hidden: bool, compiled: Compiled | None = None
    ) -> None:
        """`compiled` makes of a layer's forward what the compile policy lets it be; None: it stays as it is."""
        self.decoder = text_decoder(model)
        self.layer_ids = check_layer_ids(layer_ids, text_config(model).num_hidden_layers)
        self.keep_final_hidden = keep_final_hidden
        self.hidden_size = int(text_config(model).hidden_size)
        self.packing = supports_packing(model)
        self._name = type(model).__name__
        layers = self.decoder.layers
        assert isinstance(layers, nn.ModuleList)
        if len(layers) <= layer_ids[-1]:
            raise ConfigError(
                f"the target has {len(layers)} layers left, feature {layer_ids[-1]} needs more: load it again for this runner"
            )
        if not keep_final_hidden:
            layers = layers[: layer_ids[-1] + 1]
            self.decoder.layers = layers
        self._layers = [layers[i] for i in layer_ids]
        self._ready = compiled is None
        if compiled is not None:
            for layer in layers:
                layer.forward = compiled(layer.forward)

    def split(self, plan: dict[str, str], group: ProcessGroup, device: torch.device) -> None:
        """Keep one rank's part of the target and run it on `device`, together with the other ranks of the group."""
        split(self.decoder, plan, group, device)

    def run(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Features [R, S, K*H] in the target's dtype, and the head's input [R, S, H] if it was asked for.

        `batch` is on the target's device. The results are ordinary tensors, fit for training. Raises ConfigError for rows
        of several documents when the target does not keep them apart.
        """
        if not self.packing and any(len(row) > 1 for row in batch.sample_ids):
            raise ConfigError(
                f"the target {self._name} has layers with a running state, which leak one document of a row into the next: "
                f"use --data.packing none"
            )
        if not self._ready:
            self._warm_up(batch)
            self._ready = True
        features = self._empty(batch, len(self.layer_ids) * self.hidden_size)
        final_hidden = self._empty(batch, self.hidden_size) if self.keep_final_hidden else None
        written = [0] * len(self._layers)
        hooks = [layer.register_forward_hook(self._writer(features, slot, written)) for slot, layer in enumerate(self._layers)]
        try:
            with torch.inference_mode():
                output = self.decoder(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False)
                if final_hidden is not None:
                    final_hidden.copy_(output.last_hidden_state)
        finally:
            for hook in hooks:
                hook.remove()
        if written != [1] * len(self._layers):
            raise RuntimeError(f"the selected layers of {self._name} ran {written} times in one pass, expected once each")
        return features, final_hidden

    @torch.inference_mode()
    def _warm_up(self, batch: PackedBatch) -> None:
        """Compile for rows of one document and for rows of two."""
        length = batch.positions.shape[1]
        alone = torch.arange(length, device=batch.positions.device).expand_as(batch.positions)
        for positions in (alone, alone % max(1, length // 2)) if self.packing else (alone,):
            self.decoder(input_ids=batch.input_ids, position_ids=positions.contiguous(), use_cache=False)

    def _empty(self, batch: PackedBatch, width: int) -> Tensor:
        """Made outside inference mode: an inference tensor could not be saved for the drafter's backward."""
        weight = self.decoder.embed_tokens.weight
        return torch.empty((*batch.input_ids.shape, width), dtype=weight.dtype, device=batch.input_ids.device)

    def _writer(self, features: Tensor, slot: int, written: list[int]) -> Any:
        start = slot * self.hidden_size

        def write(_module: nn.Module, _args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            features[..., start : start + self.hidden_size].copy_(states)
            written[slot] += 1

        return write


@torch.inference_mode()
def _leaks(decoder: Any) -> bool:
    """Whether the second of two packed documents feels another first document, or differs from itself run alone."""
    weight = decoder.embed_tokens.weight
    length = 8
    ids = torch.arange(3 * length, device=weight.device).view(3, length) % weight.shape[0]
    rows = torch.stack((torch.cat((ids[0], ids[1])), torch.cat((ids[2], ids[1]))))
    positions = torch.arange(length, device=ids.device).repeat(2, 2)
    packed = decoder(input_ids=rows, position_ids=positions, use_cache=False).last_hidden_state[:, length:].float()
    alone = decoder(input_ids=ids[1:2], position_ids=positions[:1, :length], use_cache=False).last_hidden_state.float()
    deviation = ((packed - alone).norm(dim=-1) / alone.norm(dim=-1).clamp_min(1e-30)).mean()
    return not deviation.item() <= _LEAK
