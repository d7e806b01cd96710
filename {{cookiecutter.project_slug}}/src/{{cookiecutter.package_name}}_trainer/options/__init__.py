"""The options of a run: declared in ``fields.py``, read and checked from the user's keywords.

Imports nothing of the trainer but ``errors``.
"""

from .fields import Options

__all__ = ["Options"]
