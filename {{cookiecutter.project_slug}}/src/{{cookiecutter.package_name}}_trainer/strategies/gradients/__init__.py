"""Gradients across ranks: averaging, sparse gradients, and ranks that use other parameters.

Several strategies use what is here; it imports none of them.
"""
