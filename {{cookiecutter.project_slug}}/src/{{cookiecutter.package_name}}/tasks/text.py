"""Text files as sequences of bytes; by default the source code of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from my_project_trainer import ConfigurationError, DataModule


class ByteSequences(Dataset[Tensor]):
    """Consecutive sequences of ``context + 1`` bytes as int64."""

    def __init__(self, data: Tensor, context: int) -> None:
        self.data = data
        self.context = context

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.data[start : start + self.context + 1].long()


class TextFiles(DataModule):
    """Your own text, or Python's source code: nine tenths for training, the rest for validation.

    The validation part is also used for test and prediction.

    Args:
        path: A text file, or a folder of text files; default: the source code of Python's standard
            library, which is on every machine.
        pattern: Pattern of file names in the folder.
        context: Bytes per sequence.
        batch_size: Sequences per device.
        max_bytes: Maximum number of bytes to read.
        num_workers: DataLoader worker processes; 0 loads batches in the training process.

    Raises:
        ConfigurationError: The path does not exist, or there is too little text.
    """

    def __init__(
        self,
        path: str | None = None,
        pattern: str = "*.py",
        context: int = 128,
        batch_size: int = 16,
        max_bytes: int = 4_000_000,
        num_workers: int = 0,
    ) -> None:
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers
        data, self.files = _read(Path(path or sysconfig.get_path("stdlib")), pattern, max_bytes)
        if len(data) < 20 * (context + 1):
            raise ConfigurationError(
                f"data.path={path!r}: {len(data)} bytes are too little for sequences of {context}"
            )
        train, val = len(data) * 9 // 10, len(data) * 19 // 20
        self.train, self.val, self.test = data[:train], data[train:val], data[val:]

    def data_files(self) -> list[Path]:
        """The files that were read, whose hashes a run records."""
        return self.files

    def train_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.train)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Tensor]:
        return self._loader(self.test)

    def predict_dataloader(self) -> DataLoader[Tensor]:
        return self.test_dataloader()

    def _loader(self, data: Tensor) -> DataLoader[Tensor]:
        sequences = ByteSequences(data, self.context)
        return DataLoader(sequences, batch_size=self.batch_size, num_workers=self.num_workers)


def _read(path: Path, pattern: str, max_bytes: int) -> tuple[Tensor, list[Path]]:
    if not path.exists():
        raise ConfigurationError(f"data.path={str(path)!r}: there is no such file or folder")
    files = (
        [path] if path.is_file() else sorted(file for file in path.glob(pattern) if file.is_file())
    )
    content, read = bytearray(), []
    for file in files:
        content += file.read_bytes()
        read.append(file)
        if len(content) >= max_bytes:
            break
    if not content:
        return torch.empty(0, dtype=torch.uint8), read
    return torch.frombuffer(content[:max_bytes], dtype=torch.uint8), read
