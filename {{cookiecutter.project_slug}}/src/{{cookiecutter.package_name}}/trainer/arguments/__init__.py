"""What a user may write: older spellings, names of other trainers, types, ranges and paths.

Imports nothing of the trainer but ``errors``.
"""
