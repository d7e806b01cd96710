"""Memory: activation checkpointing, meta-device initialization, batch-size search."""
