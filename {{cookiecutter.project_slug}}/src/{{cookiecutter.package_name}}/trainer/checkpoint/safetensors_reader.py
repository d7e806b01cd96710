"""Read tensors from a checkpoint's safetensors files, whose headers are parsed at most once."""

from pathlib import Path

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata


class SafetensorsReader(HuggingFaceStorageReader):
    """A storage reader for repeated calls of ``torch.distributed.checkpoint.load``.

    Args:
        directory: Directory of the files.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read the files' headers once: they do not change."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata
