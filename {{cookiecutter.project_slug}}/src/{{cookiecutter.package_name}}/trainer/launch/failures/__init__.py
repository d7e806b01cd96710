"""Failure handling: reports, stack traces, and threads that detect hangs."""
