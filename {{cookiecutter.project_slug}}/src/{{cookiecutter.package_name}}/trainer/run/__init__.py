"""One rank's run, and the plan that is checked before any process starts.

``plan.py`` checks all arguments together, ``rank.py`` connects, makes the parts and runs the loop.
Imports all other folders.
"""
