"""Checkpoints and run directories: read, write, select and lock them.

Imports ``launch`` and the folders below it; nothing here depends on a strategy.
"""
