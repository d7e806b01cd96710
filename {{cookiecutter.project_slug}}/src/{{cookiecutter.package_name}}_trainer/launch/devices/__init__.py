"""Devices of this machine: which exist, which are idle, and why some cannot be used.

Imports ``errors`` and ``arguments``.
"""

from .accelerator import ADDED, Accelerator, Hardware, choose_accelerator, count
from .device_list import parse_devices

__all__ = [
    "ADDED",
    "Accelerator",
    "Hardware",
    "choose_accelerator",
    "count",
    "parse_devices",
]
