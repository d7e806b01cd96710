"""How the ranks of a run are started: by an external launcher, or by this process.

``start.py`` starts them, ``watch.py`` watches them, and one process needs neither; ``rank.py`` is
for each rank, ``cluster.py`` reads from the environment which rank this process is, ``devices.py``
which devices it has. Imports ``options`` and ``errors``.
"""
