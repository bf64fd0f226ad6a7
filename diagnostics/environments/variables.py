"""Environment variables and package indexes that decide how torch runs, with secrets masked."""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from diagnostics.environments.masking import masked, masked_variable

_RELEVANT = re.compile(
    r"^(?:TORCH|PYTORCH|AOT_|CUDA|CUBLAS|CUDNN|NVIDIA_|NCCL_|NVSHMEM_|TRITON_|HIP_|ROCR_|HSA_|MIOPEN_|XLA_|OMP_|MKL_|KMP_|GOMP_|"
    r"OPENBLAS_|BLIS_|NUMEXPR_|PYTHON|LD_|MALLOC_|GLIBC_|TOKENIZERS_|TRANSFORMERS_|HF_|ACCELERATE_|DEEPSPEED_|FLASH_|XFORMERS_|"
    r"VLLM_|SGLANG_|WANDB_|GLOO_|UCX_|FI_|SLURM_CPU|PIP_|UV_|DFLASH_|CC$|CXX$|VIRTUAL_ENV$|CONDA_DEFAULT_ENV$)"
)
_PIP_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")
_INDEX_OPTIONS = ("index-url", "extra-index-url", "find-links", "no-index", "constraint")


def relevant(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are set, by name, masked."""
    values = os.environ if environment is None else environment
    return {name: masked_variable(name, values[name]) for name in sorted(values) if _RELEVANT.match(name)}


def pip_settings() -> dict[str, str]:
    """Where pip looks for packages, from its files (its variables are among the variables), masked; a damaged file is said."""
    found = {}
    named = os.environ.get("PIP_CONFIG_FILE")
    for path in (*map(Path, _PIP_FILES), Path(sys.prefix) / "pip.conf", *([Path(named)] if named else [])):
        parser = configparser.RawConfigParser(strict=False)
        try:
            with path.expanduser().open(encoding="utf-8") as file:
                parser.read_file(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, configparser.Error) as error:
            found[masked(str(path))] = f"not observed: {type(error).__name__}"  # its text may hold what must not be shown
            continue
        for section in parser.sections():
            for option in _INDEX_OPTIONS:
                if parser.has_option(section, option):
                    found[f"{masked(str(path))} {section}.{option}"] = masked(parser.get(section, option))
    return found
