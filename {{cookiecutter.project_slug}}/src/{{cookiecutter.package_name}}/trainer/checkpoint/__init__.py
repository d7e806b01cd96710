"""Checkpoints and run directories: read, write, choose, lock.

Imports ``launch`` and what stands below it; nothing here knows a strategy.
"""
