"""The DeepSpeed engine. Nothing outside this folder names it."""
