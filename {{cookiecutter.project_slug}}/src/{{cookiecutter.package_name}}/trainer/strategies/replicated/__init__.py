"""Strategies whose processes hold the whole model each."""
