"""Errors of modules that import torch, apart from them: commands name these without importing those. Imports no torch."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, or trusted; the message says why and what to do. Commands exit with 2."""


class ContractError(RuntimeError):
    """An export that servers would misread; the message lists the problems. Commands exit with 1."""
