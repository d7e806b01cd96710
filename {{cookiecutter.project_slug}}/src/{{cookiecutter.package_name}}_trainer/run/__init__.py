"""One rank's run, and the plan that is checked before any process starts.

``plan.py`` checks all arguments together; ``rank.py`` connects a rank and runs its command, of
which ``training.py`` is the fit. Imports all other folders.
"""
