"""The frozen parts of the target that the drafter borrows: its token embedding and its head.

Legend: H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.config import ConfigError
from dflash.modeling.anatomy import text_config, text_decoder
from dflash.modeling.head_scores import capped

# Relative deviation allowed between these ends and the target's own, in the coarser of both dtypes.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class FrozenEnds(nn.Module):
    """Embedding and head of a target, own copies on one device, without gradients. Tied weights stay one tensor."""

    def __init__(self, embedding: nn.Module, head_weight: Tensor | None, softcap: float | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.head = None if head_weight is None else nn.Parameter(head_weight, requires_grad=False)
        self.softcap = softcap
        self.requires_grad_(requires_grad=False)

    @classmethod
    def from_model(cls, model: Any, device: torch.device | str, dtype: torch.dtype) -> Self:
        """Copy the ends of a transformers model to `device` in `dtype`.

        The copies are compared with what the model does to a few tokens. Raises ConfigError when the model does more to
        embeddings or logits than an embedding module, a matrix and a soft cap.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is None or head is None:
            raise ConfigError(f"the target {type(model).__name__} has no embedding or no head: use a causal language model")
        if getattr(head, "bias", None) is not None:
            raise ConfigError(
                f"the head of the target {type(model).__name__} has a bias: drafters share a head that is one matrix"
            )
        tied = head.weight is embedding.weight
        with torch.no_grad():
            own = copy.deepcopy(embedding).to(device=device, dtype=dtype)
            weight = None if tied else head.weight.detach().clone().to(device=device, dtype=dtype)
        ends = cls(own, weight, getattr(text_config(model), "final_logit_softcapping", None))
        ends._compare(model)
        return ends

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [V, H]; the embedding's own tensor when the target ties them."""
        if self.head is not None:
            return self.head
        weight = self.embedding.weight
        assert isinstance(weight, Tensor)
        return weight

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...], scaled as the target scales them."""
        embedded: Tensor = self.embedding(ids)
        return embedded

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] fp32 of hidden states [..., H] after a final norm, soft-capped as the target does."""
        return capped(self.raw_logits(hidden), self.softcap)

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The head's product [..., V], without a cap, in the head's dtype: as in the target, also under autocast."""
        with torch.autocast(hidden.device.type, enabled=False):
            weight = self.head_weight
            return F.linear(hidden.to(weight.dtype), weight)

    @torch.inference_mode()
    def _compare(self, model: Any) -> None:
        decoder = text_decoder(model)
        source = decoder.embed_tokens.weight
        ids = torch.arange(4, device=source.device)[None] % self.head_weight.shape[0]
        seen: list[Tensor] = []
        hook = decoder.layers[0].register_forward_pre_hook(
            lambda _module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        try:
            final = decoder(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            hook.remove()
        theirs = model(input_ids=ids, use_cache=False).logits
        tolerance = max(_TOLERANCE[source.dtype], _TOLERANCE[self.head_weight.dtype])
        for what, own, expected in (
            ("embeddings", self.embed(ids.to(self.head_weight.device)), seen[0]),
            ("logits", self.logits(final.to(self.head_weight.device)), theirs),
        ):
            deviation = _relative_deviation(own, expected)
            if not deviation <= tolerance:
                raise ConfigError(
                    f"the {what} of the target {type(model).__name__} are not those of its embedding and head alone "
                    f"(relative deviation {deviation:.2g}, allowed {tolerance:.2g}): use another target"
                )


def embedding_scale(model: Any) -> float:
    """What a target multiplies the rows of its embedding by: 1 for most, about the root of H for Gemma."""
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        row = embedding.weight[:64].float().norm(dim=-1).argmax()
        weight = embedding.weight[row].float()
        scale = float((embedding(row[None])[0].float() @ weight) / (weight @ weight).clamp_min(1e-30))
    return 1.0 if abs(scale - 1) < 1e-2 else float(f"{scale:.4g}")


def _relative_deviation(own: Tensor, expected: Tensor) -> float:
    expected = expected.to(own.device).float()
    return ((own.float() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()
