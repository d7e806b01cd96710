"""What a fork server imports for the tests of DeepSpeed."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # it is read on import

import deepspeed  # noqa: F401
