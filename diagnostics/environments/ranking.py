"""How likely a difference changes speed or tracing, and why. The rules are data, the first that matches counts.

The order is experience, not proof: it says where to look first. Imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WORDS = ("no", "unlikely", "possible", "likely")


@dataclass(frozen=True)
class Rule:
    """What a name tells. `speed` and `tracing` are indices of WORDS."""

    pattern: str  # of the whole name
    speed: int
    tracing: int
    why: str


_RULES = (
    Rule(r"torch(_build\..*|_git)?|(packages|distributions)\.torch", 3, 3,
         "Dynamo, FX, Inductor and the kernels are torch's own code, and the compile cache starts empty"),
    Rule(r"edited\.torch|startup_files\..*", 3, 3, "code that no version number tells of runs in every process"),
    Rule(r"edited\..*", 2, 2, "an installed package is not what its version says"),
    Rule(r"variables\.(TORCHDYNAMO_DISABLE|TORCH_COMPILE_DISABLE|PYTORCH_JIT|TORCHDYNAMO_.*|TORCH_COMPILE.*|AOT_.*)", 3, 3,
         "it decides what is compiled at all"),
    Rule(r"config\..*(disable|suppress_errors|recompile_limit|error_on_nested_fx_trace|cache_size_limit|enabled?).*", 3, 3,
         "it decides what is compiled, and what happens when that fails"),
    Rule(r"config\.torch\._dynamo\..*", 2, 3, "a setting of Dynamo"),
    Rule(r"config\..*", 3, 2, "a setting of the compiler"),
    Rule(r"git\..*|git", 3, 3, "the code itself is another one"),
    Rule(r"gpus.*|gpu_settings\.name|cuda_visible_devices", 3, 1, "another number or model of GPUs"),
    Rule(r"gpu_settings\.(power_limit|max_sm_clock|application_sm_clock).*", 3, 0, "it caps how fast the GPU may run"),
    Rule(r"gpu_settings\.(mig|nvlinks_up|pcie_width)", 3, 0, "a part of the GPU or of its links is missing"),
    Rule(r"gpu_settings\.(max_memory_clock|application_memory_clock|ecc|pcie_max_).*", 2, 0,
         "memory or transfers of the GPU run at another rate"),
    Rule(r"cuda|(torch_runtime|packages|distributions)\.(.*cudnn.*|.*cublas.*|cuda)", 3, 1, "it brings other kernels"),
    Rule(r"(packages|distributions)\.(pytorch-)?triton", 3, 2,
         "it compiles Inductor's kernels, and the compile cache starts empty"),
    Rule(r"(torch_runtime\.nccl|(packages|distributions)\.nvidia-nccl.*|variables\.NCCL_.*)", 3, 0,
         "it moves data between GPUs"),

    Rule(r"(packages|distributions)\.(flash-attn.*|xformers|liger-kernel|transformer-engine.*|apex|bitsandbytes|sglang.*|vllm|"
         r"flashinfer.*)", 3, 2, "it brings kernels, or replaces parts of models"),
    Rule(r"(packages|distributions)\.(transformers|accelerate|deepspeed|peft|diffusers|pytorch-lightning|lightning)", 2, 3,
         "it holds the model's code: what is traced is another program"),
    Rule(r"torch_runtime\.import", 3, 3, "torch can be imported on one side only"),
    Rule(r"torch_runtime\.build_settings", 3, 1, "torch was built in another way"),
    Rule(r"torch_runtime\.threads|omp_num_threads|variables\.(OMP|MKL|KMP|GOMP|OPENBLAS|NUMEXPR)_.*", 3, 0,
         "it sets the number of CPU threads, or where they run"),
    Rule(r"variables\.(CUDA_LAUNCH_BLOCKING|PYTORCH_.*ALLOC_CONF|CUBLAS_.*|CUDA_.*|NVIDIA_.*|TORCH_CUDNN.*)", 3, 0,
         "it changes how the GPU is used"),
    Rule(r"variables\.(LD_PRELOAD|MALLOC_.*|GLIBC_.*)", 2, 1, "another allocator or library lies under the program"),
    Rule(r"variables\.LD_.*", 2, 1, "other libraries may be loaded"),
    Rule(r"variables\.(TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|TORCHINDUCTOR_FORCE_DISABLE_CACHES)", 2, 1,
         "another compile cache: the first steps compile again"),
    Rule(r"variables\.(TORCH|PYTORCH|TRITON|TORCHINDUCTOR).*", 3, 2, "a setting of torch or Triton"),
    Rule(r"variables\.PYTHON(PATH|HOME|STARTUP)", 2, 2, "other modules may be imported"),
    Rule(r"variables\.PYTHON.*", 2, 1, "a setting of Python"),
    Rule(r"variables\.(VIRTUAL_ENV|CONDA_.*|PIP_.*|UV_.*|WANDB_.*)|pip\..*", 1, 0,
         "it changes speed only through what is installed from there"),
    Rule(r"variables\..*", 2, 1, "a setting of a library"),
    Rule(r"cpu|cores|logical_cores|system_details\.(usable_cpus|cpu_quota|cpu_governor)", 3, 0,
         "Python, data loading and kernel launches run there"),
    Rule(r"driver|gpu_settings\.(driver|cuda_of_driver|vbios)", 3, 0, "it schedules and clocks the GPU"),
    Rule(r"memory_gib|system_details\.(memory_limit|huge_pages|swap_gib)", 2, 0, "too little memory makes the machine swap"),
    Rule(r"python", 2, 2, "Dynamo reads the bytecode of this Python"),
    Rule(r"machine|system|host", 2, 1, "another machine"),
    Rule(r"system_details\.(kernel|libc|container)", 1, 0, "it rarely changes more than system calls"),
    Rule(r"(packages|distributions)\.(numpy|datasets|pyarrow|tokenizers|safetensors|nvidia-.*|sympy)", 2, 1,
         "it feeds the GPU, or torch is built on it"),
    Rule(r"(packages|distributions)\..*", 1, 1, "nothing is known of it that touches torch"),
    Rule(r"gpu_settings\..*", 1, 0, "a setting of the GPU"),
    Rule(r"torch_runtime\.import_seconds", 0, 0, "a measured time"),
)  # fmt: skip
_COMPILED = tuple((re.compile(rule.pattern), rule) for rule in _RULES)
_UNKNOWN = Rule("", 1, 1, "nothing is known about it")


def rule_of(name: str) -> Rule:
    """The rule for a difference of this name."""
    return next((rule for pattern, rule in _COMPILED if pattern.fullmatch(name)), _UNKNOWN)
