"""Read tensors from a checkpoint's safetensors files, whose headers are parsed at most once."""

import os
from pathlib import Path

from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata


class _Files(FileSystem):
    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(path)] if Path(path).is_file() else super().ls(path)


class SafetensorsReader(HuggingFaceStorageReader):
    """A storage reader for repeated calls of ``torch.distributed.checkpoint.load``.

    Args:
        path: A file, or a directory of files.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.fs = _Files()
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Read the files' headers once: they do not change."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata
