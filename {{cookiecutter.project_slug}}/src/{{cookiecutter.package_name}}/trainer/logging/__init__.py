"""What is recorded: metrics, loggers and the progress bar.

Imports ``launch`` and what stands below it.
"""
