"""Memory: activation checkpointing and meta-device initialization.

What is here works under every strategy. Imports ``data``, ``module`` and the folders below them.
"""
