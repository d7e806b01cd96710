"""A small generative adversarial network, trained with manual optimization."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, Optimizer
from torchmetrics.image.fid import FrechetInceptionDistance

from my_project_trainer import TrainingModule


class GAN(TrainingModule):
    """A DCGAN (https://arxiv.org/abs/1511.06434) for images of 8 x 8 pixels, from 0 to 1.

    Logs both losses, and the Fréchet distance between real and generated images.

    Args:
        noise: Number of random inputs of the generator per image.
        width: Channels of the discriminator's first convolution; inner layers have twice as many.
        learning_rate: Learning rate of both Adam optimizers.
        accumulate: Batches per optimizer step.
    """

    automatic_optimization = False

    def __init__(
        self, noise: int = 16, width: int = 32, learning_rate: float = 1e-3, accumulate: int = 2
    ) -> None:
        super().__init__()
        self.noise = noise
        self.learning_rate = learning_rate
        self.accumulate = accumulate
        self.example_input_array = torch.zeros(1, noise)
        self.generator = nn.Sequential(
            nn.Unflatten(1, (noise, 1, 1)),
            nn.ConvTranspose2d(noise, 2 * width, 4, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, width, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 1),
        )
        # Computed from the pixels: Inception features are meant for larger images.
        self.distance = FrechetInceptionDistance(
            nn.Flatten(), normalize=True, input_img_size=(1, 8, 8)
        )

    def forward(self, noise: Tensor) -> Tensor:
        """Generate images (batch, 1, 8, 8) from noise (batch, ``noise``)."""
        images: Tensor = self.generator(noise)
        return images

    def generate(self, count: int) -> Tensor:
        """Generate ``count`` new images."""
        return self(torch.randn(count, self.noise, device=self.device))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, _ = batch
        generator, discriminator = self.optimizers()
        ends_step = (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch
        fake = self.generate(len(real))

        with discriminator.toggle_model(sync_grad=ends_step):
            d_loss = self._loss(real, 1.0) + self._loss(fake.detach(), 0.0)
            self.manual_backward(d_loss)
            if ends_step:
                discriminator.step()
                discriminator.zero_grad()

        with generator.toggle_model(sync_grad=ends_step):
            g_loss = self._loss(fake, 1.0)
            self.manual_backward(g_loss)
            if ends_step:
                generator.step()
                generator.zero_grad()

        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def _loss(self, images: Tensor, label: float) -> Tensor:
        """Loss of the discriminator's prediction that all images are real (1) or generated (0)."""
        logits = self.discriminator(images)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_distance("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._log_distance("test", batch)

    def _log_distance(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        real, _ = batch
        self.distance.update(self.generate(len(real)), real=False)
        self.distance.update(real, real=True)
        self.log(f"{stage}_distance", self.distance)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Generate as many images as there are real ones in the batch."""
        return self.generate(len(batch[0]))

    def configure_optimizers(self) -> list[Optimizer]:
        return [
            Adam(network.parameters(), self.learning_rate, betas=(0.5, 0.999))
            for network in (self.generator, self.discriminator)
        ]
