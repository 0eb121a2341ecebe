"""Train a PyTorch model within a memory budget, as fast as can be."""
