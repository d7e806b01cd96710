"""Train PyTorch models with any distributed strategy, selected by one flag."""
