"""A CUDA build of torch on a machine without a GPU: the process dies when a second thread compiles.

Making a FakeTensor there sets up CUDA's device guard once more in each thread, and the second time reads what does not exist
(seen on torch 2.11.0). Without a GPU nothing needs the guard.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch


def without_gpu_guard() -> contextlib.AbstractContextManager[object]:
    """Leave out the step that crashes, on such a machine only. Not for blocks that overlap: the first to end restores it."""
    if torch.version.cuda is None or torch.cuda.is_available() or not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        return contextlib.nullcontext()
    return mock.patch.object(torch._C, "_ensureCUDADeviceGuardSet", return_value=None)
