"""Reads tensors from a checkpoint's safetensors files, each at most once looked through."""

from pathlib import Path

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata


class SafetensorsReader(HuggingFaceStorageReader):
    """A storage reader for many calls of ``torch.distributed.checkpoint.load``.

    Args:
        directory: of the files.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """What torch's own reader finds in the files' heads, which do not change."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata
