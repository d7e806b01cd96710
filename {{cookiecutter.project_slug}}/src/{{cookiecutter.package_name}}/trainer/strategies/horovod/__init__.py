"""The Horovod engine. Nothing outside this folder names it."""
