"""The PyTorch/XLA engine. No file outside this folder names it; deleting the folder removes it."""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...errors import ConfigurationError
from ...launch.devices import Hardware, parse_devices
from ...options import Options
from ..registry import Entry, Registration

PACKAGE = "torch_xla"
INSTALL = "make xla (into an environment of its own, .venv-xla)"
DEVICE = "PJRT_DEVICE"
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"


def count_chips() -> int | None:
    """Number of TPU chips of this machine; ``None`` without a torch_xla that fits torch."""
    if importlib.util.find_spec(PACKAGE) is None or mismatch() is not None:
        return None
    if os.environ.get(DEVICE, "TPU").upper() != "TPU":
        return 0
    vendors = _PCI_DEVICES.glob("*/vendor")  # of chips, and of network cards of Google's cloud
    if not any(vendor.read_text("utf-8").strip() == _GOOGLE for vendor in vendors):
        return 0  # importing torch_xla takes seconds, sets PJRT_DEVICE, and prints a warning
    from torch_xla._internal import tpu

    # It counts them on the PCI bus, and opens none: a chip belongs to one process at a time.
    return int(tpu.num_available_chips())


def mismatch() -> str | None:
    """Why the installed torch_xla cannot be imported with this torch; ``None`` if it can."""
    try:
        built_for = version(PACKAGE)
    except PackageNotFoundError:
        return None
    if built_for.split(".")[:2] == torch.__version__.split(".")[:2]:
        return None
    problem = f"torch_xla {built_for} works only with torch of the same version"
    return f"{problem}, and this is torch {torch.__version__}: {INSTALL}"


def problems_of(options: Options) -> list[str]:
    """One line for another torch, and for a number of chips that PyTorch/XLA cannot use."""
    lines = [line for line in [mismatch()] if line is not None]
    chips = count_chips() if options.accelerator == "tpu" else None
    try:
        asked = len(parse_devices(options.devices, chips)) if chips else 1
    except ConfigurationError:
        asked = 1  # reported with the devices
    if asked not in (1, chips):
        problem = f"PyTorch/XLA runs on one chip, or on all {chips} of this machine"
        lines.append(f"devices={options.devices!r}: {problem}; give 1 or 'auto'")
    return lines


_LACKS = {"find_unused_parameters": "it finds them without this option; leave the option out"}
REGISTRATION = Registration(
    {"xla": Entry("xla:XLA", lacks=_LACKS)},
    accelerators={"tpu": Hardware("xla", count_chips, "xla")},
)
