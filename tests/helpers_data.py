"""What the tests of dflash.data share: a byte-level tokenizer, chat templates, a random tiny target and random examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash.batch import Example
from dflash.command_config import PrepareConfig
from dflash.config import TargetConfig
from dflash.data.generate import Question, Sampling, answer

SPECIAL = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<mask>")

WITH_GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WITHOUT_GENERATION = WITH_GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
END_OUTSIDE_BLOCK = WITH_GENERATION.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
NEWLINE_INSIDE_BLOCK = WITH_GENERATION.replace("<|end|>{% endgeneration %}\n", "<|end|>\n{% endgeneration %}")
THINKING = WITHOUT_GENERATION.replace(
    "{% if add_generation_prompt %}<|assistant|>\n",
    "{% if add_generation_prompt %}<|assistant|>\n{% if not enable_thinking %}<think></think>{% endif %}",
).replace("<|assistant|>\n{{", "<|assistant|>\n{% if loop.last and not enable_thinking %}<think></think>{% endif %}{{")
REWRITES_EARLIER = WITHOUT_GENERATION.replace(
    "<|assistant|>\n{{ m.content }}", "<|assistant|>\n{{ m.content if loop.last else m.content.split('#')[-1] }}"
)
REWRITES_PROMPT = WITHOUT_GENERATION.replace(
    "{% if add_generation_prompt %}<|assistant|>\n", "{% if add_generation_prompt %}<|assistant|>think\n"
)


def byte_tokenizer(template: str | None = WITH_GENERATION) -> PreTrainedTokenizerFast:
    """One token per byte, special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>", mask_token="<mask>")
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL[2:5])})
    fast.chat_template = template
    return fast


def tiny_target(vocab_size: int = 272, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 in fp32 whose greedy answers are not constant."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=byte_tokenizer().eos_token_id,
        pad_token_id=byte_tokenizer().pad_token_id,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def saved_target(directory: Path, template: str | None = WITH_GENERATION) -> Path:
    """The tiny target with its tokenizer as a directory in Hugging Face format."""
    tiny_target().save_pretrained(directory)
    byte_tokenizer(template).save_pretrained(directory)
    return directory


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def example(sample_id: str, mask: list[bool] | str, first_id: int = 1) -> Example:
    """An example with the mask "..##" (# supervised) and counting token ids."""
    flags = np.array([c == "#" for c in mask] if isinstance(mask, str) else mask, dtype=np.bool_)
    return Example(sample_id=sample_id, ids=np.arange(first_id, first_id + len(flags), dtype=np.int32), loss_mask=flags)


def random_examples(count: int, *, seed: int = 0, longest: int = 60, vocab_size: int = 300) -> list[Example]:
    """Examples of random lengths with one prompt and one answer of at least two tokens each."""
    generator = np.random.default_rng(seed)
    examples = []
    for number in range(count):
        length = int(generator.integers(4, longest + 1))
        prompt = int(generator.integers(1, length - 1))
        examples.append(
            Example(
                sample_id=f"s{number}",
                ids=generator.integers(0, vocab_size, length).astype(np.int32),
                loss_mask=np.arange(length) >= prompt,
            )
        )
    return examples


def prepare_config(directory: Path, target: Path, rows: list[Any] | str, /, **changes: Any) -> PrepareConfig:
    """The configuration that prepares `directory`/data from rows of prompts, or from the source that `rows` names."""
    prompts = rows if isinstance(rows, str) else str(write_jsonl(directory / "prompts.jsonl", rows))
    values: dict[str, Any] = {
        "prompts": prompts,
        "output": directory / "data",
        "target": TargetConfig(path=str(target), dtype="float32"),
        "max_new_tokens": 12,
        "heldout_fraction": 0.0,
    }
    return PrepareConfig(**{**values, **changes})


def questions(*lengths: int, seed: int = 0) -> list[Question]:
    generator = np.random.default_rng(seed)
    return [Question(sample_id=f"q{i}", ids=generator.integers(0, 256, n).tolist()) for i, n in enumerate(lengths)]


def frequent_end(model: Any, asked: list[Question]) -> set[int]:
    """A token that ends some of the greedy answers early, and not others."""
    free = answer(model, asked, Sampling(max_new_tokens=16, end_token_ids=set()))
    for token in sorted({t for tokens in free for t in tokens}):
        at = [tokens.index(token) if token in tokens else None for tokens in free]
        found = [i for i in at if i is not None]
        if None in at and len(set(found)) > 1:
            return {token}
    raise AssertionError("the random target gives every prompt the same answer")
