"""Crash logs: bytes to lines, lines to tracebacks and thread dumps, and what is known of each failure. Imports no torch."""
