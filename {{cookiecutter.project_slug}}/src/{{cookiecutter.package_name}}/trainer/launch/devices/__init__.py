"""Devices of this machine: which exist, which are idle, and why some cannot be used.

Imports ``errors``, ``arguments`` and collectives.
"""

from .accelerator import Accelerator, check_one_each, choose_accelerator
from .device_list import parse_devices

__all__ = [
    "Accelerator",
    "check_one_each",
    "choose_accelerator",
    "parse_devices",
]
