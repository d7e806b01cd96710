"""Memory: activation checkpointing, meta-device initialization, batch-size search.

What is here works under every strategy. Imports ``data``, ``module`` and the folders below them.
"""
