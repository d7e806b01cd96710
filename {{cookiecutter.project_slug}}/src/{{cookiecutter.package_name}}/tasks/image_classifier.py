"""A small convolutional image classifier."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from my_project_trainer import TrainingModule


class ImageClassifier(TrainingModule):
    """Two convolutions and two linear layers; logs loss and accuracy.

    Args:
        image_size: Height and width of the images, divisible by 4.
        channels: Channels of the images.
        classes: Number of classes.
        width: Channels of the first convolution.
        dropout: Dropout probability.
        learning_rate: Learning rate of AdamW.
    """

    def __init__(
        self,
        image_size: int = 8,
        channels: int = 1,
        classes: int = 10,
        width: int = 32,
        dropout: float = 0.2,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.example_input_array = torch.zeros(1, channels, image_size, image_size)
        self.network = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * (image_size // 4) ** 2, classes),
        )

    @property
    def sequential_module(self) -> nn.Sequential:
        """The layers that ``strategy="sequential"`` divides over processes."""
        return self.network

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits (batch, classes) of images (batch, channels, height, width)."""
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_quality("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_quality("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Predict the most likely class of each image."""
        return self(batch[0]).argmax(dim=1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)

    def _log_quality(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{stage}_loss", cross_entropy(logits, labels))
        accuracy = (logits.argmax(dim=1) == labels).double().mean()
        self.log(f"{stage}_accuracy", accuracy, prog_bar=True)
