"""scikit-learn's handwritten digits: 1797 real images of 8 x 8 pixels, included in the package."""

from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from my_project_trainer import ConfigurationError, DataModule


def _check_installed() -> None:
    if find_spec("sklearn") is None:
        raise ConfigurationError(
            "data: Digits needs scikit-learn, which is not installed; run `pip install "
            "scikit-learn`, or install this project with its extra `examples`"
        )


class DigitImages(Dataset[tuple[Tensor, int]]):
    """The images (1, 8, 8), with values from 0 to 1, and their labels.

    Args:
        shift: Augmentation: move each image by up to this many pixels, at random each time.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """

    def __init__(self, shift: int = 0) -> None:
        _check_installed()
        from sklearn.datasets import load_digits  # imported here, because it is slow

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
    """Three quarters of the images for training, an eighth each for validation and test.

    Images are loaded on first use: a process that only launches ranks does not load them.

    Args:
        batch_size: Batch size per device.
        shift: Augmentation of the training images, in pixels.
        num_workers: DataLoader worker processes; 0 loads batches in the training process.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """

    def __init__(self, batch_size: int = 32, shift: int = 0, num_workers: int = 0) -> None:
        _check_installed()  # before any process starts, although the images are loaded later
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shift = shift

    @cached_property
    def plain(self) -> DigitImages:
        """All images, without augmentation."""
        return DigitImages()

    @cached_property
    def augmented(self) -> DigitImages:
        """All images, augmented for training."""
        return DigitImages(self.shift)

    @cached_property
    def parts(self) -> dict[str, list[int]]:
        """Indices of the images for training, validation and test."""
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

    def _loader(self, images: DigitImages, split: str) -> DataLoader[tuple[Tensor, int]]:
        subset = Subset(images, self.parts[split])
        return DataLoader(subset, batch_size=self.batch_size, num_workers=self.num_workers)
