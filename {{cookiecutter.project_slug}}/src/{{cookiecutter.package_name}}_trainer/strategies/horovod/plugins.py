"""The plugin of older trainers that means Horovod."""

from typing import ClassVar

from ...arguments.plugin import Plugin


class HorovodPlugin(Plugin):
    """Older spelling of ``strategy="horovod"``, with its options."""

    strategy: ClassVar[str] = "horovod"
