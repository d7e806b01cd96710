"""Gradients across ranks: averaging, sparse gradients, and ranks that use other parameters."""
