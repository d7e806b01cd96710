"""The training loop, evaluation and manual optimization.

Imports every folder but ``run``; talks to a strategy by its contract alone.
"""
