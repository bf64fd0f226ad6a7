"""From prompts on disk to packed batches of fixed shape."""
