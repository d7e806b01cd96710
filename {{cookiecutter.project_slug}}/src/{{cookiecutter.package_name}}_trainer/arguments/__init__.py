"""Trainer arguments: older spellings, names from other trainers, types, ranges and paths.

Imports nothing of the trainer but ``errors``.
"""
