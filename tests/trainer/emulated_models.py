"""Models that are trained on the emulated GPU, and count what their steps wait for."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import my_project_trainer as trainer
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torchmetrics import SumMetric

from emulated_counts import Counts, counting

# Steps that record nothing: the first is logged, and so is the last.
FIRST, LAST = 3, 5
ADAMW = partial(AdamW, lr=0.01)


class Window:
    """Counts from the begin of a step to that of a later one: all that is between."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._open = ExitStack()

    def begin(self, step: int) -> None:
        """A step begins, counted from 1."""
        if step == FIRST and not self.counts.operators:
            self.counts = self._open.enter_context(counting())
        elif step > LAST:
            self._open.close()


class Model(trainer.TrainingModule):
    """A small classifier with dropout and BatchNorm, which counts what its steps wait for.

    ``work`` is done in each training step, with its input and loss.
    """

    def __init__(
        self,
        make: Callable[..., Optimizer] = ADAMW,
        work: Callable[[Tensor, Tensor], object] = lambda x, loss: None,
    ) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        )
        self.make, self.work = make, work
        self.window, self.validation_window = Window(), Window()
        self.devices: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.window.begin(self.global_step + 1)
        return self.train_on(batch)

    def train_on(self, batch: Any) -> Tensor:
        """The loss, which is logged with a number of Python's."""
        x, labels = batch
        loss = cross_entropy(self.network(x), labels)
        self.work(x, loss)
        self.devices |= {str(tensor.device) for tensor in (x, loss, *self.parameters())}
        self.log("loss", loss, on_epoch=True)
        self.log("least", float(self.global_step), on_epoch=True, reduce_fx="min")
        self.log("seen", 4.0, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_window.begin(batch_idx + 1)
        x, labels = batch
        self.log("val_loss", cross_entropy(self.network(x), labels))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, labels = batch
        self.log("test_loss", cross_entropy(self.network(x), labels))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.network(batch[0])
        return {"scores": scores, "of": (scores.argmax(1), [batch_idx])}

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


class Manual(Model):
    """The same with manual optimization, and clipping."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.window.begin(self.global_step + 1)
        optimizer = self.optimizers()
        self.manual_backward(self.train_on(batch))
        optimizer.clip_gradients(0.5)
        optimizer.step()
        optimizer.zero_grad()


class Measured(Model):
    """The same with a metric of torchmetrics, which lasts for an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = SumMetric(nan_strategy="disable")

    def train_on(self, batch: Any) -> Tensor:
        loss = super().train_on(batch)
        self.metric.update(loss.detach())
        self.log("metric", self.metric)
        return loss
