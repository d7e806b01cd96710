"""``single_device``: one process on one device."""

from ..base import Strategy
from ..limits import Limits


class SingleDevice(Strategy):
    """One process on one device."""

    limits: Limits = Limits(max_devices=1, max_nodes=1)
