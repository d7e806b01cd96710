"""Batches: the global order of samples, each replica's share, and randomness.

Imports ``launch``, ``module`` and what stands below them.
"""
