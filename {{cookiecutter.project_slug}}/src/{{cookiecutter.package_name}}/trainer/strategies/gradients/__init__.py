"""Gradients over processes: averages, sparse ones, and ranks that use different parameters."""
