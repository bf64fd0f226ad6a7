"""Compile caches on disk: what lies there, who wrote it, who uses it, and copies of it. Imports no torch."""
