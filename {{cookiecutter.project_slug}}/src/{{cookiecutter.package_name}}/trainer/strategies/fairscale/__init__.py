"""The FairScale engine. Nothing outside this folder names it."""
