"""Logging: metrics, loggers and the progress bar.

Imports ``launch`` and the folders below it.
"""
