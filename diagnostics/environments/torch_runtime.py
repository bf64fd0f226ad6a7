"""What only an imported torch can tell: that it can be imported, how it was built, which cuDNN and NCCL it loads.

It is imported in a process of its own, beside the caller's work: a torch that fails, crashes or hangs is an answer then.
Run as a file; prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

TIMEOUT_SECONDS = 60.0
NOT_OBSERVED = "not observed: "


class Look:
    """Started at once, waited for later; `stop` ends it in any case."""

    def __init__(self) -> None:
        command = (sys.executable, "-P", str(Path(__file__).resolve()))  # -P: the folder of this file is no place for imports
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """What it told, or `not_observed` with the reason."""
        try:
            output, errors = self._process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            return {"import": f"{NOT_OBSERVED}import torch took longer than {timeout_seconds:.0f} s"}
        try:
            values: dict[str, Any] = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError):
            last = (errors.strip().splitlines() or ["no words"])[-1]
            return {"import": f"{NOT_OBSERVED}import torch failed with exit code {self._process.returncode}: {last[:300]}"}
        return values

    def stop(self) -> None:
        """Kill it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def main() -> None:
    """Import torch and tell."""
    began = time.perf_counter()
    import torch  # noqa: PLC0415 - the import is what is looked at

    seconds = time.perf_counter() - began
    nccl, cudnn = cast("Any", torch.cuda.nccl), cast("Any", torch.backends.cudnn)
    values = {
        "import": "works",
        "import_seconds": round(seconds, 2),
        "cudnn": _told(cudnn.version),
        "nccl": _told(lambda: ".".join(map(str, nccl.version()))),
        "threads": torch.get_num_threads(),
        "build_settings": torch.__config__.show(),
    }
    sys.stdout.write(json.dumps(values) + "\n")


def _told(ask: Any) -> Any:
    try:
        value = ask()
    except (AttributeError, ImportError, OSError, RuntimeError) as error:
        return f"{NOT_OBSERVED}{str(error).strip()[:200]}"
    return f"{NOT_OBSERVED}this build of torch has none" if value is None else value


if __name__ == "__main__":
    main()
