"""Laws of the target's session: what can be rolled back, what is collected, what is refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash.config import ConfigError
from dflash.decoding.target_session import TargetSession
from dflash.modeling.target import RANDOM_TARGETS


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gemma3"])
def test_a_rolled_back_target_answers_as_if_it_had_never_seen_the_rest(family: str) -> None:
    """Gemma's window of 8 tokens is long past when the 5 tokens are taken back."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(RANDOM_TARGETS[family](), dtype=torch.float32).eval()
        ids = torch.randint(0, 500, (24,))
        expected = model(input_ids=ids[None], output_hidden_states=True)
        with TargetSession(model, (1, 4)) as session:
            session.prefill([ids[:15]])
            session.verify(torch.randint(0, 500, (1, 5)), torch.arange(15, 20)[None], None)
            session.keep([[]])
            logits = session.verify(ids[None, 15:], torch.arange(15, 24)[None], None)
            session.keep([list(range(9))])
            features = session.features(torch.arange(6)[None])
    assert (session.lengths, session.forwards) == ([24], 3)
    torch.testing.assert_close(logits[0], expected.logits[0, 15:], rtol=1e-4, atol=1e-4)
    layers = torch.cat([expected.hidden_states[2], expected.hidden_states[5]], dim=-1)
    torch.testing.assert_close(features, layers[:, 15:21], rtol=1e-4, atol=1e-4)


def test_a_hybrid_target_is_refused_with_the_reason() -> None:
    model = AutoModelForCausalLM.from_config(RANDOM_TARGETS["qwen3_5"]())
    with pytest.raises(ConfigError, match=r"layers of type linear_attention, whose cache .* cannot be cropped"):
        TargetSession(model, ())


def test_a_target_that_declares_a_running_state_is_refused() -> None:
    text = SimpleNamespace(get_text_config=lambda **_arguments: SimpleNamespace())
    with pytest.raises(ConfigError, match="has a running state"):
        TargetSession(SimpleNamespace(config=text, _is_stateful=True), ())


def test_a_drafter_of_a_deeper_target_is_refused_and_leaves_no_hook() -> None:
    model = AutoModelForCausalLM.from_config(RANDOM_TARGETS["qwen3"]())
    with pytest.raises(ConfigError, match="reads layer 9 of a target with 8 layers"), TargetSession(model, (0, 9)):
        pass
    assert not any(module._forward_hooks for module in model.modules())
