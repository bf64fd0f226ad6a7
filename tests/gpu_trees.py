"""Laws of trees verified by compiled flex_attention, which only a GPU can show. Not collected by name; run it with

python -m pytest tests/gpu_trees.py --gpus 1

Everything is in fp32, so that the tokens of plain decoding, of trees by SDPA and of trees by flex_attention must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers_decoding import drafter_for, knowing, prompt_of, random_rule, sharp_drafter, target
from torch._dynamo.utils import counters

from dflash.config import DrafterConfig
from dflash.decoding.chain import plain
from dflash.decoding.flex_trees import attend_compiled, block_mask
from dflash.decoding.rounds import Drafting, Generation, Wanted, decode
from dflash.decoding.visibility import visible
from dflash.modeling.drafter import DrafterShape
from dflash.modeling.target import FrozenEnds, text_config
from fixtures import tiny_target

pytestmark = [
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # exact fp32 is what is compared
    pytest.mark.filterwarnings("ignore:.*Online softmax is disabled:UserWarning"),
]
CUDA = torch.device("cuda")
LENGTHS = (3, 140, 300)  # of prompts: the caches grow over the borders of several tiles
NEW_TOKENS = 40


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    """Graphs of other tests are not counted."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Graphs that were compiled since the test began."""
    return int(counters["stats"]["unique_graphs"])


def on_gpu(family: str) -> tuple[Any, Any]:
    """A target and an untrained drafter for it."""
    if family == "tiny target":
        model, _ = tiny_target.load(dtype=torch.float32, device="cuda")
        text = text_config(model)
        config = DrafterConfig(block_size=6, num_layers=2, target_layer_ids=(0, 2))
        drafter = sharp_drafter(DrafterShape.from_target(text, config, text.vocab_size - 1))
    else:
        model, drafter = copy.deepcopy(target(family)[0]).to(CUDA), copy.deepcopy(drafter_for(family, 6))
    return model.eval().requires_grad_(requires_grad=False), drafter.to(CUDA)


@pytest.mark.parametrize("family", ["tiny target", "gemma3"])
def test_trees_by_flex_and_by_sdpa_are_lossless_and_accept_the_same(family: str) -> None:
    """gemma3 has layers with a window of 8 tokens; one request and several, which end together and grow apart."""
    model, drafter = on_gpu(family)
    ends = FrozenEnds.from_model(model, CUDA, torch.float32)
    for lengths in (LENGTHS[1:2], LENGTHS):
        prompts = [prompt_of(length, length) for length in lengths]
        free = [plain(model, prompt, max_new_tokens=NEW_TOKENS + 10).tokens for prompt in prompts]
        found: dict[str, list[Generation]] = {}
        for attention in ("sdpa", "flex"):
            drafting = Drafting(drafter=drafter, ends=ends, budget=60, tree_attention=attention)  # type: ignore[arg-type]
            with knowing(prompts, free, errors=0.5, seed=2):
                found[attention] = decode(model, prompts, Wanted(max_new_tokens=NEW_TOKENS), drafting=drafting)
            got = [generation.tokens for generation in found[attention]]
            assert got == [tokens[:NEW_TOKENS] for tokens in free], (
                f"{attention}, {len(prompts)} requests: other tokens than plain"
            )
        accepted = {name: [[r.accepted for r in g.rounds] for g in done] for name, done in found.items()}
        assert accepted["flex"] == accepted["sdpa"], f"accepted drafts of each round: {accepted}"
        assert max(map(max, accepted["flex"])) >= 3, f"no deep path was accepted, so nothing was tried: {accepted}"
    assert 1 <= graphs() <= 2, f"{graphs()} graphs: one for one request and one for several were expected"


@pytest.mark.parametrize("nodes", [17, 257])
def test_one_graph_serves_all_lengths_and_windows_and_equals_sdpa(nodes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for columns in (1, 100, 127, 128, 129, 383, 640, 1000):
        for window in (None, 40):
            rule = [part.to(CUDA) if isinstance(part, torch.Tensor) else part for part in random_rule(3, columns, nodes, columns)]
            q, k, v = (
                torch.randn(3, heads, length, 64, generator=generator).to(CUDA) for heads, length in _sizes(columns, nodes)
            )
            with torch.inference_mode():
                found = attend_compiled(q, k, v, block_mask(*rule, window))
                expected = F.scaled_dot_product_attention(q, k, v, visible(*rule, window)[:, None], enable_gqa=True)
            error = (found - expected).abs().max().item()
            assert error <= 2e-5, f"{columns} columns, window {window}: differs by {error:.1e} from SDPA"
            worst = max(worst, error)
    assert worst > 0, "SDPA ran in both places: the kernels are equal to the bit"
    assert graphs() == 1, f"{graphs()} graphs for lengths of 1 to 1000 tokens: one was expected"


def _sizes(columns: int, nodes: int) -> tuple[tuple[int, int], ...]:
    return (8, nodes), (2, columns + nodes), (2, columns + nodes)
