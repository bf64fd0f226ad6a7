"""Kinds of failure that come from GPUs, their driver, and the ranks that wait for each other."""

from __future__ import annotations

from diagnostics.logs.kinds import Kind, Mark

GPU_KINDS = (
    Kind(
        id="cuda-oom",
        title="a GPU is out of memory",
        marks=(
            Mark("CUDA out of memory."),
            Mark("HIP out of memory."),
            Mark("torch.OutOfMemoryError"),
            Mark("torch.cuda.OutOfMemoryError"),
            Mark("CUBLAS_STATUS_ALLOC_FAILED", sure="likely"),
            Mark("CUDA error: out of memory"),
        ),
        means="An allocation did not fit. What held the memory is told below where the message says it.",
        to_do="Smaller batches or fewer anchors, activation checkpointing; torch.cuda.memory._record_memory_history() shows "
        "who allocates. If compiled "
        "flex_attention fell back (recompile limit, FX error before this), cure that first: uncompiled it materialises all "
        "scores.",
        no_help="torch.cuda.empty_cache() in a loop: PyTorch has already tried that before it raises.",
    ),
    Kind(
        id="illegal-access",
        title="a kernel accessed memory that is not its own",
        marks=(
            Mark("an illegal memory access was encountered"),
            Mark("CUDA_ERROR_ILLEGAL_ADDRESS"),
            Mark("misaligned address", sure="likely"),
            Mark("unspecified launch failure", sure="likely"),
        ),
        means="The error is reported at a later call: the line in the traceback is where it was noticed, not where it "
        "happened. The process's "
        "CUDA context is lost.",
        to_do="Run again with CUDA_LAUNCH_BLOCKING=1, then under compute-sanitizer; suspect index tensors out of range, odd "
        "shapes and custom or "
        "autotuned kernels. With several GPUs in one process check the current device of each thread.",
        no_help="Catching the error and going on: every later CUDA call fails. Mending the line that the traceback names, "
        "before CUDA_LAUNCH_BLOCKING.",
    ),
    Kind(
        id="device-assert",
        title="an assertion in a kernel failed",
        marks=(Mark("device-side assert triggered"), Mark("Assertion", pattern=r"\.cu:\d+: .*Assertion `.*` failed")),
        means="Mostly an index out of range: a token id beyond the vocabulary, a label beyond the classes, a gather beyond "
        "its size.",
        to_do="Run again with CUDA_LAUNCH_BLOCKING=1, or the same batch on the CPU, which names the index. The text before "
        "`Assertion` names the kernel.",
        no_help="Catching it: the CUDA context is lost.",
    ),
    Kind(
        id="gpu-hardware",
        title="the driver reported a fault of a GPU (Xid, ECC, off the bus)",
        marks=(
            Mark("NVRM: Xid"),
            Mark("uncorrectable ECC error"),
            Mark("GPU has fallen off the bus"),
            Mark("GPU is lost", sure="likely"),
        ),
        means="The GPU or its link failed, or (Xid 13, 31, 43) a program's kernel did.",
        to_do="Look the Xid up in NVIDIA's table; check `nvidia-smi -q` for ECC and retired pages; take the GPU out of use "
        "if it comes again.",
        no_help="Changing the training code, unless the Xid is 13, 31 or 43.",
    ),
    Kind(
        id="driver-mismatch",
        title="driver and CUDA build do not fit",
        marks=(
            Mark("The NVIDIA driver on your system is too old"),
            Mark("CUDA driver version is insufficient for CUDA runtime version"),
            Mark("Driver/library version mismatch"),
            Mark("Found no NVIDIA driver on your system"),
            Mark("forward compatibility was attempted on non supported HW"),
            Mark("the provided PTX was compiled with an unsupported toolchain"),
        ),
        means="torch was built for a newer CUDA than the driver serves, or the driver was replaced while its old kernel "
        "module is still loaded.",
        to_do="Compare `nvidia-smi` (the driver's CUDA) with torch.version.cuda: install the torch build for the driver's "
        "CUDA, or a newer driver. "
        "After `Driver/library version mismatch`: reboot, or reload the kernel modules.",
        no_help="Installing the CUDA toolkit: torch brings its own runtime. Deleting caches.",
    ),
    Kind(
        id="no-kernel-image",
        title="this build has no code for this GPU",
        marks=(
            Mark("no kernel image is available for execution on the device"),
            Mark("is not compatible with the current PyTorch installation"),
            Mark("Value 'sm_", pattern=r"is not defined for option 'gpu-name'"),
        ),
        means="torch, an extension or ptxas is older than the GPU's architecture.",
        to_do="Install builds made for this compute capability (torch.cuda.get_arch_list()); rebuild extensions.",
        no_help="A newer driver.",
    ),
)
RANK_KINDS = (
    Kind(
        id="nccl-timeout",
        title="a collective did not finish in time (NCCL watchdog)",
        marks=(
            Mark("Watchdog caught collective operation timeout"),
            Mark("Timed out waiting", pattern=r"Timed out waiting \d+ ?ms for (?:recv|send)", sure="likely"),
            Mark("Timed out after", pattern=r"Timed out after \d+ seconds? waiting for clients"),
            Mark("wait timeout after", pattern="store|TCPStore|keys", sure="likely"),
        ),
        means="Ranks waited for one that did not come: it crashed, hung (a deadlock, a slow compile, a slow file system) or "
        "took another path. The "
        "ranks that print this are the ones that waited.",
        to_do="Look at the ranks that print nothing, or the lowest last enqueued work, first; get their stacks (py-spy "
        "dump). Compile before the first "
        "collective. TORCH_NCCL_TRACE_BUFFER_SIZE=2000 records what each rank enqueued.",
        no_help="A longer time-out, unless the slow rank is known to be busy (first compile, checkpoint). NCCL_P2P_DISABLE "
        "and the like, by chance.",
        follows=True,
    ),
    Kind(
        id="nccl-watchdog-stuck",
        title="NCCL's watchdog itself was stuck",
        marks=(Mark("Heartbeat monitor timed out"), Mark("watchdog got stuck for", sure="certain")),
        means="A CUDA or NCCL call does not return, or another thread holds the GIL inside one: often a deadlock in this "
        "process.",
        to_do="py-spy dump --native of this rank while it hangs; look for a thread that compiles or synchronises under a lock.",
        no_help="TORCH_NCCL_ENABLE_MONITORING=0: the hang stays, only the message goes.",
    ),
    Kind(
        id="nccl-error",
        title="NCCL reported an error of the system or of a peer",
        marks=(
            Mark("ncclUnhandledCudaError"),
            Mark("ncclSystemError"),
            Mark("ncclInternalError"),
            Mark("ncclInvalidUsage"),
            Mark("ncclRemoteError"),
            Mark("NCCL error", pattern=r"NCCL error (?:in|in:)|unhandled (?:cuda|system) error", sure="likely"),
        ),
        means="ncclRemoteError: a peer went away, look there. ncclSystemError: sockets, shared memory or limits. "
        "ncclUnhandledCudaError: a CUDA error, often "
        "of another kind, came first.",
        to_do="Run again with NCCL_DEBUG=INFO and read the last lines of the rank that failed first; check /dev/shm, ulimit "
        "-l and the network interface.",
        no_help="Changing the model.",
        follows=True,
    ),
    Kind(
        id="collective-mismatch",
        title="ranks called different collectives",
        marks=(
            Mark("Detected mismatch between collectives on ranks"),
            Mark("ranks have different", sure="possible", pattern="collective|sequence number"),
        ),
        means="The ranks took different paths: a condition that depends on the rank's data, uneven batches, a skipped step.",
        to_do="Make the decision on one rank and broadcast it; run with TORCH_DISTRIBUTED_DEBUG=DETAIL to see both calls.",
        no_help="A longer time-out.",
    ),
    Kind(
        id="peer-lost",
        title="the connection to another rank broke",
        marks=(
            Mark("Connection closed by peer"),
            Mark("Connection reset by peer", sure="likely"),
            Mark("Broken pipe", pattern=r"c10d|gloo|TCPStore|sendBytes", sure="likely"),
            Mark("recvValue failed"),
            Mark("failed to recv, got 0 bytes"),
            Mark("Socket Timeout", sure="likely"),
            Mark("Application timeout caused pair closure"),
        ),
        means="Another rank ended or its machine went away. This rank is the witness.",
        to_do="Look for the first error of the other ranks, in time; if they printed none, for a kill (out of memory, "
        "pre-emption) in their machine's dmesg.",
        no_help="Mending this rank.",
        follows=True,
    ),
    Kind(
        id="dead-worker",
        title="a worker process ended",
        marks=(
            Mark("ChildFailedError"),
            Mark("failed (exitcode:", pattern=r"failed \(exitcode: +-?\d+\)"),
            Mark("exited unexpectedly", pattern=r"(?i)worker|process"),
            Mark("ProcessExitedException"),
            Mark("ProcessRaisedException"),
            Mark("exitcode  :", pattern=r"exitcode +: +-?\d+", sure="certain"),
            Mark("BrokenProcessPool"),
            Mark("Signal", pattern=r"Signal \d+ \(SIG\w+\) received by PID"),
        ),
        means="The launcher says that a rank ended; its own error is elsewhere in the log, or it was killed by the signal "
        "that is named.",
        to_do="Find that rank's own error. Exit code -9: the kernel or a person killed it (dmesg: out of memory). -11: a "
        "crash in C++. -15: it was told to stop "
        "because another rank failed. If error_file is <N/A>, put @torch.distributed.elastic.multiprocessing.errors.record "
        "on main().",
        no_help="Reading the launcher's own traceback: it says nothing about the cause.",
        follows=True,
    ),
)
KINDS = (*GPU_KINDS, *RANK_KINDS)
