"""The training loop, evaluation and manual optimization.

Imports every folder but ``run``; uses strategies only through their contract.
"""
