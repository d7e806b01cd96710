"""Failure handling: reports, stack traces, and threads that detect hangs.

``launch`` exports what other folders use. Imports files of ``launch`` that start nothing.
"""
