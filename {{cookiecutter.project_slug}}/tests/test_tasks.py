"""The tasks that come with the project: examples of tests of your own modules and data.

A module is tested without a trainer where its steps are (`training_step` is a function of a batch),
and with one in this process where a whole fit is.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import my_project_trainer as trainer
from my_project.tasks import digits, text
from my_project.tasks.gan import GAN
from my_project.tasks.image_classifier import ImageClassifier
from my_project.tasks.language_model import LanguageModel

# --- data ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.Digits(batch_size=16, shift=1)


def test_digits_are_split_without_overlap(data: digits.Digits) -> None:
    sizes = {split: len(indices) for split, indices in data.parts.items()}
    assert sizes == {"train": 1349, "val": 224, "test": 224}
    assert sorted(index for split in data.parts.values() for index in split) == list(range(1797))
    assert digits.Digits().parts == data.parts


@pytest.mark.parametrize(
    ("stage", "samples"), [("train", 1349), ("val", 224), ("test", 224), ("predict", 224)]
)
def test_digits_come_in_batches(data: digits.Digits, stage: str, samples: int) -> None:
    loader = getattr(data, f"{stage}_dataloader")()
    assert len(loader.dataset) == samples
    images, labels = next(iter(loader))
    assert (images.shape, images.dtype) == ((16, 1, 8, 8), torch.float32)
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.shape == (16,)
    assert set(labels.tolist()) <= set(range(10))


def test_text_is_cut_into_sequences_that_share_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(200)) * 5)
    book = text.TextFiles(str(path), context=10, batch_size=3)
    assert (len(book.train), len(book.val), len(book.test)) == (900, 50, 50)
    sequences = book.train_dataloader().dataset
    assert [sequences[index].tolist() for index in (0, 1)] == [list(range(11)), list(range(10, 21))]
    assert next(iter(book.train_dataloader())).shape == (3, 11)


# --- modules, step by step -------------------------------------------------------------------


def losses_of(model: Any, batch: object, steps: int) -> list[float]:
    """Losses of some steps on one batch, without a trainer."""
    configured = model.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    losses = []
    for index in range(steps):
        loss = model.training_step(batch, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_classifier_learns_a_batch(data: digits.Digits) -> None:
    torch.manual_seed(0)
    model = ImageClassifier(width=8, dropout=0.0, learning_rate=0.02)
    losses = losses_of(model, next(iter(data.val_dataloader())), 20)
    assert losses[0] == pytest.approx(math.log(10), abs=0.3)
    assert losses[-1] < losses[0] / 4


def make_gpt(**options: int) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**{"layers": 2, "heads": 2, "width": 32, "context": 24, **options})


def make_bytes(count: int = 4, length: int = 24) -> Tensor:
    return torch.randint(256, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("changed", [1, 11, 23])
def test_a_later_byte_changes_no_earlier_logits(changed: int) -> None:
    model, tokens = make_gpt().eval(), make_bytes()
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 256
    before, after = model(tokens), model(other)
    assert before.shape == (4, 24, 256)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed] != after[:, changed]).any()


def test_one_step_lowers_the_loss_of_the_language_model() -> None:
    first, second = losses_of(make_gpt(warmup_steps=1), make_bytes(4, 25), 2)
    assert second < first


# --- a whole fit, in this process ------------------------------------------------------------


def short(tmp_path: Path, **options: Any) -> trainer.Trainer:
    """A trainer on one CPU that writes below the test's own folder."""
    shared = {"accelerator": "cpu", "devices": 1, "loggers": [], "enable_progress_bar": False}
    return trainer.Trainer(**{**shared, "default_root_dir": tmp_path, **options})


def test_both_networks_of_the_gan_are_trained(tmp_path: Path) -> None:
    images = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, torch.zeros(10)), batch_size=2)
    model, run = GAN(width=4, accumulate=2), short(tmp_path, max_epochs=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    run.fit(model, loader)
    assert run.global_step == 5
    after = dict(model.named_parameters())
    moved = {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])}
    assert moved == {"generator", "discriminator"}


def test_a_module_of_your_own_is_fitted(tmp_path: Path) -> None:
    class Line(trainer.TrainingModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            loss = (self.weight * x - y).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    x, model = torch.ones(8, 1), Line()
    run = short(tmp_path, max_epochs=20)
    run.fit(model, DataLoader(TensorDataset(x, 3 * x), batch_size=4))
    assert run.global_step == 40
    assert model.weight.item() == pytest.approx(3.0)
