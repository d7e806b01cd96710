"""scikit-learn's handwritten digits: 1797 real images of 8 by 8 pixels, part of the package."""

from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from ..trainer import ConfigurationError, DataModule


def _check_installed() -> None:
    if find_spec("sklearn") is None:
        raise ConfigurationError(
            "data: Digits needs scikit-learn, which is not installed; run `pip install "
            "scikit-learn`, or install this project with its extra `examples`"
        )


class DigitImages(Dataset[tuple[Tensor, int]]):
    """The images (1, 8, 8), values from 0 to 1, and their labels.

    Args:
        shift: move each image by up to so many pixels, anew each time: augmentation.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """

    def __init__(self, shift: int = 0) -> None:
        _check_installed()
        from sklearn.datasets import load_digits  # here, since only this class pays for it

        digits = load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        self.labels: list[int] = digits.target.tolist()
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.shift:
            down, right = torch.randint(-self.shift, self.shift + 1, (2,)).tolist()
            image = image.roll((down, right), dims=(1, 2))
        return image, self.labels[index]


class Digits(DataModule):
    """Three quarters to train on, an eighth each to validate and to test.

    Images are read when they are first asked for: a process that only starts others never does.

    Args:
        batch_size: of one device.
        shift: augmentation of the training images, in pixels.
        num_workers: processes that make batches; 0 makes them in the training process.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """

    def __init__(self, batch_size: int = 32, shift: int = 0, num_workers: int = 0) -> None:
        _check_installed()  # before any process starts, though the images are read later
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shift = shift

    @cached_property
    def plain(self) -> DigitImages:
        """All images, as they are."""
        return DigitImages()

    @cached_property
    def augmented(self) -> DigitImages:
        """All images, for training."""
        return DigitImages(self.shift)

    @cached_property
    def parts(self) -> dict[str, list[int]]:
        """Indices of the images to train on, to validate with and to test with."""
        order = torch.randperm(len(self.plain), generator=torch.Generator().manual_seed(0)).tolist()
        eighth = len(order) // 8
        return {
            "train": order[2 * eighth :],
            "val": order[eighth : 2 * eighth],
            "test": order[:eighth],
        }

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(self.augmented, "train")

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(self.plain, "val")

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self._loader(self.plain, "test")

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        return self.test_dataloader()

    def _loader(self, images: DigitImages, part: str) -> DataLoader[tuple[Tensor, int]]:
        subset = Subset(images, self.parts[part])
        return DataLoader(subset, batch_size=self.batch_size, num_workers=self.num_workers)
