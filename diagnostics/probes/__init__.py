"""Probes: each watches one thing, writes observations into a `Log`, and comes off without a trace."""
