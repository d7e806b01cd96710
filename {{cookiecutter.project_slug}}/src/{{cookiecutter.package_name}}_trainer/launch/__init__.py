"""How the ranks of a run are started: by an external launcher, or by this process.

``start.py`` starts them, ``watch.py`` watches them, ``cluster.py`` reads from the environment which
rank this process is, ``devices.py`` which devices it has. Imports ``options`` and ``errors``.
"""

from .reports import RankError, describe, is_reported, watch_for_hangs
from .start import (
    drop_inherited_variables,
    is_interactive,
    run_external,
    run_in_processes,
    supervise_copies,
)

__all__ = [
    "RankError",
    "describe",
    "drop_inherited_variables",
    "is_interactive",
    "is_reported",
    "run_external",
    "run_in_processes",
    "supervise_copies",
    "watch_for_hangs",
]
