"""The failures of threads that trace and compile in one process: how each is recognised, why it happens, what to do.

The ids are those of diagnostics/README.md. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

_ONE_THREAD = (
    "Let one thread do every first compile, forward and backward, before the others start, and let nothing recompile later; "
    "or give each device its own process."
)
_SERIAL = (
    f"{_ONE_THREAD} Or call dflash.fx.isolate() at the top of the program: each thread then traces for itself. A lock of your "
    "own helps only if every trace and every compiled call takes it."
)
_NOT_BY_ISOLATION = "dflash.fx.isolate() does not cure it."
_NOT_A_CURE = (
    "Setting error_on_nested_fx_trace to False, or patching the check away, turns the error into code that runs uncompiled, "
    "silently."
)


@dataclass(frozen=True)
class Failure:
    """One kind of failure."""

    title: str
    why: str
    what_to_do: str


CATALOGUE = {
    "F1": Failure(
        "a compiled call met another thread's trace and raised",
        "Up to torch 2.13 the tracing flag is one for the process: while one thread traces, compiled calls of all threads fail.",
        f"{_SERIAL} torch 2.14 and later keep this flag per thread. {_NOT_A_CURE}",
    ),
    "F1-own": Failure(
        "a compiled function was called inside a trace of the same thread",
        "FX does not trace into compiled functions. No other thread is involved.",
        "Trace the function before it is compiled, or compile the traced result.",
    ),
    "F2": Failure(
        "a compiled call met another thread's trace and ran uncompiled, silently",
        "error_on_nested_fx_trace is False: what would have raised runs as plain Python, several times slower, unannounced.",
        f"Set torch._dynamo.config.error_on_nested_fx_trace back to True. {_SERIAL}",
    ),
    "F3": Failure(
        "a module call was taken into another thread's trace",
        "While one thread traces, nn.Module.__call__ of the whole process leads to its tracer. The caller gets an error, or a "
        "Proxy instead of a tensor, and the traced graph may have gained nodes of the caller.",
        f"Discard the traced graph as well. {_SERIAL}",
    ),
    "F4": Failure(
        "a module call passed through another thread's trace unharmed",
        "While one thread traces, nn.Module.__call__ of the whole process leads to its tracer; this tracer let the call through.",
        f"It is slower, and one unlucky moment from F3 or F5. {_SERIAL}",
    ),
    "F5": Failure(
        "patches of nn.Module are left behind by traces that ended out of order",
        "Each trace restores what it found when it began. When two overlap and the first ends first, the second restores the "
        "first's patch.",
        "Restart the process; modules compiled from now on may silently stay uncompiled. To go on without a restart, call "
        f"dflash.fx.repair.repair() when no thread traces. {_SERIAL}",
    ),
    "F5-overlap": Failure(
        "two threads traced at the same time",
        "Each trace patches nn.Module for the whole process and restores what it found: what happens depends on who ends first.",
        _SERIAL,
    ),
    "F6": Failure(
        "the tracing flag is stuck although nothing traces",
        "Two traces ended out of order, on a torch whose flag is one for the process: every later compiled call raises or runs "
        "uncompiled.",
        f"Restart the process, or set torch.fx._symbolic_trace._is_fx_tracing_flag to False. {_SERIAL}",
    ),
    "F7": Failure(
        "compiled code is bypassed",
        "A code object keeps a limited number of compiled versions over all threads, devices and shapes (8 unless configured). "
        "Beyond it runs uncompiled; flex_attention then materialises all attention scores and traces on every call.",
        "Fix the shapes, mark what varies as dynamic, or raise torch._dynamo.config.recompile_limit (from torch 2.12: in every "
        "thread, or as an argument of torch.compile). fullgraph=True turns such a fallback into an error.",
    ),
    "F8": Failure(
        "the compile lock and autograd's device thread wait for each other",
        "Autograd runs the backward of all threads that use one device in one thread of its own. A thread that compiles holds "
        "the compile lock and takes a gradient meanwhile (flex_attention does), so it waits for the device thread; that one runs "
        "another thread's backward, which compiles (lazily, at the first backward) and waits for the lock.",
        "Kill the process: it does not end by itself. Then let one thread do every first compile, forward and backward, for "
        "every shape, before the others start; or give each device its own process; or run backward in the calling thread "
        "(torch.autograd.set_multithreading_enabled(False)) with thread-isolated tracing, or compile backward "
        "graphs together with the forward (torch._functorch.config.force_non_lazy_backward_lowering). Hold no lock of your own "
        "around backward.",
    ),
    "F9": Failure(
        "a setting of torch.compile made in one thread is not seen in another",
        "From torch 2.12 the values of torch._dynamo.config and torch._inductor.config are context variables: a new thread, and "
        "autograd's thread of a device, start with the defaults, for example with a recompile limit of 8.",
        "Set them in every thread, start threads with contextvars.copy_context().run, or pass recompile_limit= and options= to "
        "torch.compile.",
    ),
    "F10": Failure(
        "a setting of torch.compile was undone by another thread",
        "Up to torch 2.11 the values of torch._dynamo.config are one for the process, and a call of a compiled function sets and "
        "restores some of them (dynamic= does): overlapping calls restore each other's.",
        f"Use one value of dynamic= everywhere. {_SERIAL} torch 2.12 and later keep these values per thread.",
    ),
    "F11": Failure(
        "code that asks is_compiling() took the branch of compiled code, although only another thread compiled",
        "From torch 2.13 torch.compiler.is_compiling() is true in all threads while any thread compiles.",
        f"Choose between compiled and plain code once, when the program starts, not at each call. {_SERIAL}",
    ),
    "F12": Failure(
        "several threads compiled the same function",
        "First calls that meet at the compile lock do not look at the cache again after waiting; devices have their own guards.",
        f"Nothing is wrong yet, but time and the recompile limit are spent. {_ONE_THREAD} {_NOT_BY_ISOLATION}",
    ),
    "F13": Failure(
        "flex_attention with gradients and without torch.compile traced in two threads at once",
        "Uncompiled flex_attention traces its score function on every call that needs gradients, under no lock: see F5.",
        f"Compile the function that calls flex_attention, with fullgraph=True. {_SERIAL}",
    ),
    "F14": Failure(
        "functions of math and of torch.fx.wrap were left wrapped, or not known to a trace",
        "While one thread traces, the functions of the module math, and those given to torch.fx.wrap, are replaced in their "
        "modules; a tracer made meanwhile in another thread notes the replacements, and does not know the functions later. "
        "Traces that end out of order leave the replacements behind.",
        f"Restart the process, or call dflash.fx.repair.repair() when no thread traces. {_SERIAL}",
    ),
    "F15": Failure(
        "two exports overlapped, or a module was used while another thread exported it",
        "An export changes flags and mode stacks of the process and restores what it found, and the module's parameters are "
        "FakeTensors meanwhile.",
        "Export in a process of its own, or before the other threads start; export a copy of a module that is in use. After two "
        "exports overlapped, restart the process.",
    ),
    "F16": Failure(
        "random numbers repeat, or a default is undone, beside a compile",
        "A compile saves the random state and the default dtype of the process when it begins and restores them when it ends: "
        "what other threads drew or set meanwhile is undone.",
        f"Draw from a torch.Generator of the thread's own; set defaults before threads start. {_ONE_THREAD} {_NOT_BY_ISOLATION}",
    ),
    "F17": Failure(
        "Triton's autotuner, CUDA-graph trees or cache loads failed in several threads",
        "They are not thread-safe either; reported as pytorch#123177, pytorch#192368 and triton#11494.",
        f"Give each GPU its own process. {_SERIAL}",
    ),
    "F18": Failure(
        "guards of a compiled function do not fit the state that it was compiled for",
        "Another thread changed what the guards look at while the function was compiled or looked up: it recompiles without a "
        "reason, fails, or is filed under the new state and computes wrong results, silently. Or a call of another thread moved "
        "an entry to the front of the function's cache while this one searched it, and it missed its own.",
        "Change modes of modules (train, eval) and globals only while nothing compiles. After the warm-up, keep cache entries "
        f"in place: torch._C._dynamo.eval_frame._set_lru_cache(False). {_SERIAL}",
    ),
    "F19": Failure(
        "a call of a fullgraph function was told that it ran uncompiled, although it did not",
        "In torch 2.13 and 2.14 the count of compiled frames in a fullgraph=True call is one for the process: the end of one "
        "call and the begin of another, both in a second thread, can set it back. Rare: seen twice in some tens of thousands of "
        "calls under stress. torch 2.15 counts per thread.",
        "After the warm-up call under torch.compiler.set_stance('fail_on_recompile'), which switches this check off and still "
        "refuses to run uncompiled; or compile without fullgraph=True.",
    ),
    "F20": Failure(
        "KeyError: 'custom' while two threads made block masks",
        "From torch 2.13 create_block_mask and BlockMask.from_kv_blocks work under an annotation of torch.fx.traceback, which is "
        "one for the process: the thread that ends second finds it deleted.",
        "Make block masks in one thread at a time (a lock around the call is enough), or once, before the threads start; "
        "dflash.fx.isolate() keeps annotations per thread.",
    ),
    "skipped": Failure(
        "Dynamo has given a function up: it runs uncompiled",
        "A compile that fails while suppress_errors is set, a graph break that it cannot resume from (in a loop, in a with "
        "block), or up to torch 2.13 a call under a TorchDispatchMode that needs a look at the function makes Dynamo skip it for "
        "the life of the process, also for calls that had a compiled version.",
        "Set torch._dynamo.config.suppress_errors to False and mend the error; TORCH_LOGS=graph_breaks shows the breaks; use "
        "modes around functions that are not compiled. fullgraph=True turns the first two into an error.",
    ),
    "mode": Failure(
        "compiled functions were called under a TorchDispatchMode, where they run uncompiled",
        "From torch 2.14 on Dynamo compiles nothing and uses nothing compiled in a call under such a mode, and does so again "
        "in calls without it.",
        "Measure or log under the mode (FLOP counters, DebugMode) beside the run, not around all of it.",
    ),
    "stance": Failure(
        "compiled functions were told to run uncompiled",
        "torch.compiler.set_stance is one for the process: every thread's compiled functions follow it while it holds.",
        "Set it where no other thread calls compiled functions, or use torch.compiler.disable on the function you mean.",
    ),
    "unclassified": Failure(
        "an exception that belongs to overlapping traces, of a kind that the catalogue does not tell apart",
        "Shared state of tracing or of functorch was changed by another thread.",
        _SERIAL,
    ),
}

_MESSAGES = (
    ("Detected that you are using FX to symbolically trace a dynamo-optimized function", "F1"),
    ("CURRENT_PATCHER is None", "F5"),
    ("module is not installed as a submodule", "F3"),
    ("Found multiple different tracers", "F3"),
    ("Unexpected recompilation: runtime guards failed", "F18"),
    ("Guard failed on the same frame it was created", "F18"),
    ("with fullgraph=True found no compiled frames", "F19"),
    ("Expected current_level > 0", "unclassified"),
    ("hit config.recompile_limit", "F7"),
    ("Hard failure due to f", "F7"),  # FailOnRecompileLimitHit, from fullgraph=True or fail_on_recompile_limit_hit
    ("flex_attention called without torch.compile", "F7"),
)


def match(message: str) -> str | None:
    """The failure that an exception's message belongs to, or None."""
    return next((failure for part, failure in _MESSAGES if part in message), None)
