"""What saves memory: activation checkpointing, the meta device, the search for a batch size."""
