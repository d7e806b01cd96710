"""Train PyTorch models under every distributed strategy with one flag."""
