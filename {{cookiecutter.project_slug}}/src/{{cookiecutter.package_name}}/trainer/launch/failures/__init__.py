"""How a run that fails says so: reports, stacks, and the threads that watch for hangs."""
