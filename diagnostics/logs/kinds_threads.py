"""Kinds of failure that come from tracing and compiling. Those of the catalogue take their words from it."""

from __future__ import annotations

from diagnostics.catalogue import CATALOGUE
from diagnostics.logs.kinds import Kind, Mark, Severity

_TRACE_STACK = r"torch/fx/_symbolic_trace\.py:module_call_wrapper|torch/fx/_symbolic_trace\.py:call_module"
_CACHE = (
    r"torchinductor|\.triton/cache|triton/cache|/inductor_cache|/triton/[0-9A-Za-z_]{20,}|_inductor/codecache|"
    r"triton/runtime/cache"
)
_NOT_PROCESS = "A warm-up in a process of its own, or a warm disk cache: each new process traces again."


def _of_catalogue(failure: str, *marks: Mark, no_help: str, severity: Severity = "error", suffix: str = "") -> Kind:
    known = CATALOGUE[failure]
    return Kind(
        id=failure + suffix,
        title=known.title,
        marks=marks,
        means=known.why,
        to_do=known.what_to_do,
        no_help=no_help,
        severity=severity,
    )


KINDS = (
    _of_catalogue(
        "F1",
        Mark("Detected that you are using FX to symbolically trace a dynamo-optimized function"),
        no_help=f"error_on_nested_fx_trace=False or patching the check away: the run goes on uncompiled, several times "
        f"slower. {_NOT_PROCESS} A new environment.",
    ),
    _of_catalogue("F1-own", no_help="Anything about threads: the trace is the thread's own."),
    _of_catalogue(
        "F3",
        Mark("module is not installed as a submodule"),
        Mark("Found multiple different tracers", sure="likely"),
        no_help="Registering the module as a submodule: it belongs to another thread's model, not to what is traced. A lock "
        "that not every trace and module call takes.",
    ),
    _of_catalogue(
        "F4",
        no_help="Ignoring it because the error beside it is another one: the stack shows that a trace was running.",
        severity="hazard",
    ),
    _of_catalogue(
        "F5",
        Mark("CURRENT_PATCHER is None"),
        no_help="Catching the error and going on: nn.Module stays patched, and what is compiled later may stay uncompiled.",
    ),
    _of_catalogue(
        "F14",
        Mark("dictionary changed size during iteration", stack=r"torch/fx/"),
        Mark("is not a torch.fx.Proxy", sure="possible"),
        no_help="Retrying in the same process while another thread traces.",
    ),
    _of_catalogue(
        "F7",
        Mark("hit config.recompile_limit"),
        Mark("hit config.cache_size_limit"),
        Mark("hit config.accumulated_recompile_limit"),
        Mark("hit config.accumulated_cache_size_limit"),
        no_help="suppress_errors, or only hiding the warning: the function stays uncompiled for the life of the process.",
        severity="hazard",
    ),
    _of_catalogue(
        "F7",
        Mark("Hard failure due to f"),  # of fullgraph=True, or of fail_on_recompile_limit_hit
        Mark("FailOnRecompileLimitHit"),
        no_help="Dropping fullgraph=True: the same calls then run uncompiled, without an error.",
        suffix="-hit",
    ),
    Kind(
        id="F7-flex",
        title="flex_attention runs uncompiled",
        marks=(Mark("flex_attention called without torch.compile"),),
        means="The unfused path materialises all attention scores: several times slower, far more memory, and with gradients "
        "it traces on "
        "every call. Torch warns once in a process, whatever number of calls it was.",
        to_do="Compile the function that calls flex_attention, with fullgraph=True; if it is compiled, look for a recompile "
        "limit or an "
        "FX error before this line, which switch compiled code off.",
        no_help="Hiding the warning. A larger compile cache on disk.",
        severity="hazard",
    ),
    _of_catalogue(
        "F18",
        Mark("Unexpected recompilation: runtime guards failed"),
        Mark("Guard failed on the same frame it was created"),
        no_help="Raising the recompile limit; reporting it as a bug of the model: another thread changed what the guards "
        "look at.",
    ),
    _of_catalogue(
        "F19",
        Mark("with fullgraph=True found no compiled frames"),
        no_help="Dropping fullgraph=True and forgetting it: then a real fallback is silent.",
    ),
    _of_catalogue(
        "F20",
        Mark("KeyError: 'custom'", stack=r"flex_attention\.py|fx/traceback\.py", sure="likely"),
        no_help="A lock around the compiled call only: create_block_mask itself must take turns.",
    ),
    _of_catalogue(
        "F17",
        Mark("AssertionError", stack=r"_inductor/cudagraph_trees\.py", sure="likely"),
        Mark(
            "RuntimeError",
            pattern=r"Error: (?:dictionary|deque|Set) ?.*changed size|mutated during iteration",
            stack=r"triton/runtime/autotuner\.py",
            sure="likely",
        ),
        no_help="Clearing the cache: two threads meet again the next time.",
    ),
    _of_catalogue(
        "F8",
        no_help="Waiting; a longer NCCL time-out; a lock of one's own around backward, which makes it certain.",
    ),
    _of_catalogue(
        "unclassified",
        Mark("Expected current_level > 0"),
        no_help="A try/except around it: the state of functorch is wrong afterwards.",
    ),
    Kind(
        id="flex-no-choices",
        title="Inductor found no kernel that fits (NoValidChoicesError)",
        marks=(Mark("No choices to select"), Mark("NoValidChoicesError")),
        means="No candidate of the autotuner compiled or fitted. In flex_attention it is mostly shared memory: head "
        "dimension, block sizes or "
        "float32 inputs (a backward under autocast gets them) are too large for this GPU's tiles.",
        to_do="Keep q, k and v in bfloat16 up to the call, backward included; pass smaller blocks in kernel_options "
        "(BLOCK_M, BLOCK_N, num_stages); "
        "look for the shape at which it fails, and for `dynamic` shapes.",
        no_help="Adding ATEN to max_autotune_gemm_backends, as the message says: it concerns matrix products, flex_attention "
        "has no ATEN kernel.",
    ),
    Kind(
        id="cache-race",
        title="a file of the compile cache vanished or was busy",
        marks=(
            Mark("FileNotFoundError", pattern=_CACHE, sure="likely"),
            Mark("FileNotFoundError", stack=_CACHE, sure="possible"),
            Mark("Stale file handle", pattern=_CACHE),
            Mark("Stale file handle", stack=_CACHE, sure="likely"),
            Mark("Device or resource busy", pattern=_CACHE),
            Mark("Text file busy", pattern=_CACHE),
            Mark("Directory not empty", pattern=_CACHE),
            Mark("FileExistsError", pattern=_CACHE, sure="likely"),
        ),
        means="Several ranks, or a clean-up job, used one Triton or Inductor cache at once: a file was replaced or deleted "
        "between two steps "
        "of another process. Network file systems make it common.",
        to_do="Put TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR on a local disk, one folder per rank or per node; delete "
        "caches only while nothing "
        "runs; compile on one rank first.",
        no_help="Deleting the cache while ranks run: that is the same race. Retrying on the same network folder.",
    ),
    Kind(
        id="cache-damaged",
        title="a file of the compile cache is damaged",
        marks=(
            Mark("EOFError", stack=_CACHE, sure="likely"),
            Mark("UnpicklingError", stack=_CACHE, sure="likely"),
            Mark("JSONDecodeError", stack=_CACHE, sure="likely"),
            Mark("file too short", pattern=_CACHE),
            Mark("invalid ELF header", pattern=_CACHE),
        ),
        means="The file was cut off: a full disk, a process killed while it wrote, or another version wrote it.",
        to_do="Stop everything, check for free space, delete this cache folder, then compile on one rank first. A cold cache "
        "means that every "
        "thread compiles at once: warm up inside the training process.",
        no_help="Deleting the cache while something runs.",
    ),
    Kind(
        id="triton-pointer",
        title="Triton was given memory of another device",
        marks=(Mark("cannot be accessed from Triton (cpu tensor?)"),),
        means="The tensor is on a CPU, or on a GPU that is not the thread's current one: with several GPUs in one process "
        "each thread starts at GPU 0.",
        to_do="Call torch.cuda.set_device(...) at the start of each thread, or use `with torch.cuda.device(...)`; check that "
        "no input is on the CPU.",
        no_help="Clearing caches or changing the Triton version.",
    ),
    Kind(
        id="compile-error",
        title="torch.compile failed to compile",
        marks=(
            Mark("BackendCompilerFailed", sure="likely"),
            Mark("InductorError", sure="likely"),
            Mark("LoweringException", sure="likely"),
            Mark("CppCompileError", sure="likely"),
            Mark("torch._dynamo.exc.InternalTorchDynamoError", sure="likely"),
            Mark("torch._dynamo.exc.Unsupported", sure="likely"),
            Mark("triton.compiler.errors", sure="likely"),
        ),
        means="The compiler gave up; the error inside says on what. It may be a consequence of an error above it.",
        to_do="Read the innermost error of the chain; TORCHDYNAMO_VERBOSE=1 shows the program's line. Try "
        "backend='aot_eager' to see which half fails.",
        no_help="suppress_errors=True: the function then runs uncompiled, silently.",
    ),
)
