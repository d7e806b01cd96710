"""Data loading: the global order of samples, the batches of each replica, and randomness.

Imports ``launch``, ``module`` and the folders below them.
"""
