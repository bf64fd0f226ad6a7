"""Where dates come from: one source a file. Each only reads; what it cannot read it says. Imports no torch."""
