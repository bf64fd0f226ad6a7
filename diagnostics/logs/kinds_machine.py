"""Kinds of failure that come from the environment, the machine and the process itself."""

from __future__ import annotations

from diagnostics.logs.kinds import Kind, Mark

ENVIRONMENT_KINDS = (
    Kind(
        id="missing-dependency",
        title="a package is missing",
        marks=(
            Mark("ModuleNotFoundError: No module named"),
            Mark("PackageNotFoundError"),
            Mark("requires Accelerate", sure="certain"),
            Mark("requires `accelerate`"),
            Mark("requires the accelerate library"),
            Mark("it was not found in your environment", sure="certain"),
            Mark("ImportError", pattern=r"requires? .*pip install", sure="likely"),
        ),
        means="Often an upgrade of one package newly needs another (transformers 5.8 needs accelerate), or the wrong "
        "environment is active. It is no race.",
        to_do="Install what is named, with the versions pinned: pip install --dry-run shows what else it would change. Check "
        "`which python`.",
        no_help="Reinstalling torch: that may replace a build that works.",
    ),
    Kind(
        id="broken-install",
        title="installed packages do not fit together",
        marks=(
            Mark("undefined symbol"),
            Mark("cannot open shared object file"),
            Mark("ImportError: cannot import name", sure="likely"),
            Mark("DLL load failed"),
            Mark("version `GLIBC"),
            Mark("version `CXXABI"),
            Mark("numpy.dtype size changed"),
            Mark("was compiled against", sure="likely", pattern="ABI|API|version"),
        ),
        means="An extension was built for another torch, CUDA or C library, or two builds were installed over each other.",
        to_do="Make a new environment from pinned versions; a build of another CUDA (cu128, cu130) installed over torch "
        "leaves files of both.",
        no_help="pip install over it once more: files of the other build stay.",
    ),
    Kind(
        id="disk-full",
        title="a disk is full",
        marks=(
            Mark("No space left on device"),
            Mark("Disk quota exceeded"),
            Mark("PytorchStreamWriter failed writing file", sure="likely"),
            Mark("enforce fail at inline_container.cc", sure="possible"),
        ),
        means="A checkpoint, the compile cache, /tmp or /dev/shm did not fit. Files written last may be cut off.",
        to_do="df -h and df -i on the folder that is named; check the last checkpoint before it is used; the compile cache "
        "may need to be deleted (while nothing runs).",
        no_help="Restarting from the newest checkpoint without having checked that it is whole.",
    ),
    Kind(
        id="shared-memory",
        title="shared memory is too small",
        marks=(
            Mark("insufficient shared memory (shm)"),
            Mark("unable to open shared memory object", sure="likely"),
            Mark("Bus error", sure="possible"),
            Mark("Too many open files"),
        ),
        means="Shared memory (64 MB in a container by default) or the number of open files is exhausted, mostly by data loaders.",
        to_do="docker run --shm-size or --ipc=host; fewer workers; ulimit -n; "
        "torch.multiprocessing.set_sharing_strategy('file_system').",
        no_help="More GPU memory.",
    ),
    Kind(
        id="port-in-use",
        title="the port of the rendezvous is taken",
        marks=(Mark("EADDRINUSE"), Mark("Address already in use", sure="likely")),
        means="An earlier run still lives, or two runs share a machine.",
        to_do="End the earlier run (ss -ltnp names it), or give --rdzv-endpoint=localhost:0 or another --master-port.",
        no_help="Waiting, while the earlier run lives.",
    ),
    Kind(
        id="checkpoint-damaged",
        title="a checkpoint cannot be read",
        marks=(
            Mark("PytorchStreamReader failed"),
            Mark("SafetensorError", sure="likely"),
            Mark("Error while deserializing header"),
            Mark("Error(s) in loading state_dict"),
        ),
        means="It is cut off, or belongs to a model of another shape.",
        to_do="Use an earlier one; compare its size with the others; write checkpoints aside and rename them.",
        no_help="strict=False: what does not fit stays at its random start.",
    ),
)
PROCESS_KINDS = (
    Kind(
        id="killed",
        title="a process was killed from outside",
        marks=(
            Mark("is killed by signal: Killed"),
            Mark("oom-kill:"),
            Mark("Out of memory: Killed process"),
            Mark("oom_reaper"),
            Mark("Killed", pattern=r"^\s*(?:\S*: line \d+: +\d+ )?Killed\b(?! by)", sure="likely"),
            Mark("DUE TO TIME LIMIT"),
            Mark("Exceeded job memory limit"),
            Mark("exit code 137", sure="likely"),
            Mark("OOMKilled"),
        ),
        means="SIGKILL: mostly the kernel's out-of-memory killer (host memory, not GPU memory), a container's or a job's limit.",
        to_do="dmesg | grep -i oom, or the job's accounting, says which limit; watch the host memory: data loader workers, "
        "pinned buffers, compile workers.",
        no_help="Anything about GPU memory.",
    ),
    Kind(
        id="segfault",
        title="a crash in C or C++ code",
        marks=(
            Mark("Fatal Python error: Segmentation fault"),
            Mark("Segmentation fault (core dumped)"),
            Mark("Segmentation fault", sure="likely"),
            Mark("SIGSEGV", sure="likely"),
            Mark("Fatal Python error: Bus error"),
            Mark("Fatal Python error: Aborted", sure="likely"),
            Mark("double free or corruption"),
            Mark("terminate called after throwing an instance of"),
            Mark("Fatal Python error: Floating-point exception"),
            Mark("Fatal Python error: Illegal instruction"),
        ),
        means="A library's native code crashed. A dump of the threads, where there is one, says what each was doing.",
        to_do="Run with python -X faulthandler; if threads were compiling or tracing, serialise that first; check that "
        "extensions were built for this torch.",
        no_help="try/except.",
    ),
    Kind(
        id="nan",
        title="numbers became NaN or infinite",
        marks=(
            Mark("returned nan values in its"),
            Mark("nan", pattern=r"(?i)(?:loss|grad_norm|grad norm|gnorm|ppl|perplexity)\W{1,5}(?:is |= ?|: ?)?-?nan\b"),
            Mark("NaN", pattern=r"(?i)(?:loss|grad_norm|grad norm|gnorm|ppl|perplexity)\W{1,5}(?:is |= ?|: ?)?-?nan\b"),
            Mark("contains NaN", sure="likely"),
            Mark("non-finite", pattern=r"(?i)loss|grad", sure="likely"),
            Mark("must be finite", pattern="(?i)loss|norm", sure="likely"),
            Mark("The total norm of order", pattern="non-finite"),
            Mark("probability tensor contains either `inf`, `nan`"),
        ),
        means="Numerics or bad data: fully masked rows, a learning rate too high for bfloat16, odd lengths in "
        "flex_attention's backward. Not a race in itself; but "
        "wrong results of overlapping traces can look like it.",
        to_do="Find the first step and the sample; replay that one with torch.autograd.detect_anomaly(); check rows of the "
        "mask that attend to nothing; keep fp32 master weights.",
        no_help="Skipping NaN steps without a count of them; lowering the loss scale in bfloat16.",
    ),
    Kind(
        id="interrupted",
        title="somebody or the launcher stopped the run",
        marks=(
            Mark("KeyboardInterrupt"),
            Mark("SignalException", sure="likely"),
            Mark("Sending process", pattern=r"closing signal SIG\w+"),
            Mark("torch.distributed.elastic.multiprocessing.api.SignalException"),
        ),
        means="Ctrl-C, SIGTERM of a scheduler, or the launcher ends the other ranks after one failed.",
        to_do="Nothing, if it was meant; otherwise see who sent the signal.",
        no_help="-",
        severity="info",
        follows=True,
    ),
    Kind(
        id="stuck-collective",
        title="threads wait in a collective (dump of the stacks)",
        marks=(),
        means="These threads wait for other ranks. One dump cannot tell a hang from a slow peer.",
        to_do="Dump every rank: the one that is not in the collective is the one to mend. A second dump some seconds later "
        "makes sure.",
        no_help="A longer time-out, before the rank that is missing is known.",
        follows=True,
    ),
)
KINDS = (*ENVIRONMENT_KINDS, *PROCESS_KINDS)
