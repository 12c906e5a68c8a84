"""What the three services agree on about a checkpoint: families, token layout arithmetic, loading one half."""
