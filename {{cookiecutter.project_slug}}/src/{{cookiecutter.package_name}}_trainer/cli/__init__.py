"""The command line, and ``load_module`` for scripts and notebooks.

Imports from all other folders.
"""

from .command import main
from .loading import load_module, load_weights

__all__ = ["load_module", "load_weights", "main"]
