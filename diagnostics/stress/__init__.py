"""Failures made to happen: one at a time by `scenarios`, at random by `python -m diagnostics.stress`."""
