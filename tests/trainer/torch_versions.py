"""Tests that the oldest torch does not pass, for reasons of its own."""

import pytest
import torch

OLDEST = torch.__version__.startswith("2.10.")
# They compare all that is printed.
quiet_gloo = pytest.mark.skipif(OLDEST, reason="gloo prints on standard output in torch 2.10")
fake_broadcast = pytest.mark.skipif(OLDEST, reason="torch 2.10 has no broadcast of fake tensors")
