"""Hooks of a module: methods that are called at moments of a run, on every rank."""

from typing import Any

from torch.optim import Optimizer

from .data_module import DataHooks


class Hooks(DataHooks):
    """Hooks of a module; override those that you need. Those of callbacks are called first."""

    def on_fit_start(self) -> None:
        """Called after the module is moved to its device, before the first step."""

    def on_fit_end(self) -> None:
        """Called after the last step, checkpoint and validation; not if the fit fails."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch; not if a run resumes within an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of an epoch, before its values are reduced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a micro-batch's forward."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch's backward, and after the step that it ends.

        ``outputs`` is what ``training_step`` returned, without gradients; ``{"loss": loss}`` if
        that was the loss alone. Several replicas' or micro-batches' of a process are gathered. In a
        pipeline, it is ``None`` in a process without the last stage.
        """

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each optimizer's step, after gradients are averaged and clipped.

        Not with manual optimization, in which ``training_step`` steps. An engine that steps by
        itself may not leave the gradients in the parameters.
        """

    def on_after_optimizer_step(self) -> None:
        """Called after the step of all optimizers; in manual optimization after each batch."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch, before its values are reduced."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch, before its values are reduced."""

    def on_exception(self, error: BaseException) -> None:
        """Called if the fit fails on this rank, before the error is raised again."""
