"""Devices of this machine: which exist, which are idle, and why some cannot be used.

Imports ``errors``, ``arguments`` and collectives.
"""

from .accelerator import ADDED, Accelerator, Hardware, check_one_each, choose_accelerator, count
from .device_list import parse_devices

__all__ = [
    "ADDED",
    "Accelerator",
    "Hardware",
    "check_one_each",
    "choose_accelerator",
    "count",
    "parse_devices",
]
