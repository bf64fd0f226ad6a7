"""Where FX tracing begins, or where its flag is looked at: the names that a scan looks for, for torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "Tracer.trace", "symbolic_trace", "make_fx", "tracing flag", "torch.export", "torch.compile", "AOTAutograd", "backward"
]

_AOT = "torch._functorch.aot_autograd"
_AOT_FUNCTIONS = (
    *("aot_function", "aot_module", "aot_module_simplified", "aot_export_module", "aot_export_joint_simple"),
    *("aot_export_joint_with_descriptors", "aot_compile_joint_with_descriptors", "prepare_aot_module_simplified"),
)
# By the dotted name of the definition; aliases and re-exports lead there.
FUNCTIONS: dict[str, Kind] = {
    "torch.fx._symbolic_trace.symbolic_trace": "symbolic_trace",
    "torch.fx.experimental.proxy_tensor.make_fx": "make_fx",
    "torch.fx._symbolic_trace.is_fx_tracing": "tracing flag",
    "torch.fx._symbolic_trace.is_fx_symbolic_tracing": "tracing flag",
    "torch.export.export": "torch.export",
    "torch.export.draft_export": "torch.export",
    "torch.export._trace._export": "torch.export",
    "torch._dynamo.eval_frame.export": "torch.export",
    "torch.compile": "torch.compile",
    "torch._dynamo.eval_frame.optimize": "torch.compile",
    "torch._dynamo.eval_frame._optimize": "torch.compile",
    **dict.fromkeys((f"{_AOT}.{name}" for name in _AOT_FUNCTIONS), "AOTAutograd"),
    "torch._dynamo.backends.common.aot_autograd": "AOTAutograd",
    "torch._functorch._aot_autograd.runtime_wrappers.AutogradLazyBackwardCompileInfo": "AOTAutograd",
    "torch.autograd.backward": "backward",
    "torch.autograd.grad": "backward",
    "torch._tensor.Tensor.backward": "backward",
}
FLAGS = {"_is_fx_tracing_flag", "_is_fx_tracing_tls"}
TRACER = "torch.fx._symbolic_trace.Tracer"
COMPILES: tuple[Kind, ...] = ("torch.compile", "AOTAutograd")

WHEN: dict[Kind, str] = {
    "Tracer.trace": "every call traces, in the calling thread",
    "symbolic_trace": "every call traces, in the calling thread",
    "make_fx": "every call of its result traces, in the calling thread",
    "tracing flag": "reads or sets what a trace in another thread sets, too (up to torch 2.13)",
    "torch.export": "every call traces, in the calling thread, without a lock",
    "torch.compile": "the first call of its result, and each recompile, traces",
    "AOTAutograd": "the first call, and the first backward, traces",
    "backward": "compiles, and traces, when the forward was compiled and its backward was not yet",
}
