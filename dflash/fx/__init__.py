"""FX tracing and threads: `seams` reads what this torch shares between them."""
