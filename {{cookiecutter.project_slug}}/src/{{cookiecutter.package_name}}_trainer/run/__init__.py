"""One rank's run, and the plan that is checked before any process starts.

``plan.py`` checks all arguments together, ``rank.py`` connects and runs the loop, whose parts
``assembly.py`` creates.
Imports all other folders.
"""
