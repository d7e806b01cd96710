"""One rank's run, and the plan that is checked before any process starts."""
