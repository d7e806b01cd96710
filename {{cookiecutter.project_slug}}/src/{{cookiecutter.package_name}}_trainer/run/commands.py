"""Commands on one rank other than fit; ``Trainer`` describes them."""

from typing import Any, Literal

from ..checkpoint import OF_ANOTHER_MODEL, resolve, run_choice, run_directory
from ..data import sources
from ..launch import files
from ..loop import evaluation, trials
from ..loop.position import Position
from ..memory import activation_checkpointing
from ..module import TrainingModule
from ..module.hooks import Hooks, is_overridden
from . import initial_weights
from .rank import RankRun

Evaluation = Literal["validation", "test", "predict"]
_HOOKS = ("on_fit_start", "on_train", "on_before", "on_after")  # what those of steps begin with


def evaluate(
    run: RankRun,
    kind: Evaluation,
    module: TrainingModule,
    data: sources.Data,
    checkpoint: str | None,
    averaged: bool,
    trained: Position,
) -> Any:
    """Validate, test or predict, with the weights of a checkpoint if one is given.

    ``trained``: where the trainer's last fit ended, for the module's ``global_step``.
    """
    run.position = Position(trained.last_epoch, global_step=trained.global_step)
    name: Literal["val", "test", "predict"] = "val" if kind == "validation" else kind
    with run.running(module, "validate" if kind == "validation" else kind, data):
        feeds = run.evaluation_feeds(sources.evaluation_loaders(data, module, name), name)
        _place(run, module, checkpoint, averaged)
        args = (module, run.strategy, run.recorder, feeds)
        if kind == "predict":
            outputs = evaluation.predict(*args, is_written=run.configuration is not None)
            return outputs.get("", outputs)
        run.metrics = evaluation.evaluate(*args, kind, run.metrics)
    run.console.say(*(f"{name}: {value:.6g}" for name, value in run.metrics.items()))
    return run.metrics


def _place(run: RankRun, module: TrainingModule, checkpoint: str | None, averaged: bool) -> None:
    if checkpoint is None:
        run.strategy.place(module)
        return
    loaded = run_choice.open_checkpoint(resolve(checkpoint))
    initial_weights.leave_to(loaded, module)
    run.strategy.place(module)
    weights, remarks = loaded.weights(averaged)
    run.console.note(*remarks)
    try:
        saved = loaded.stored_state()["position"]
        of_epoch = Position(saved["epoch"], saved["step_in_epoch"])
        run.position = Position(of_epoch.last_epoch, global_step=loaded.step)
        run.strategy.load_state({**loaded.stored_state(), "model": weights}, None)
    except OF_ANOTHER_MODEL as error:
        raise loaded.mismatch(error) from None


def _note_hooks(run: RankRun, module: TrainingModule, command: str) -> None:
    names = [name for name in vars(Hooks) if name.startswith(_HOOKS)]
    if hooks := [name for name in names if is_overridden(module, Hooks, name)]:
        run.console.note(f"{command} does not call {type(module).__name__}.{', '.join(hooks)}")


def find_batch_size(run: RankRun, module: TrainingModule, data: sources.Data) -> int:
    """The largest batch that a device can train on, the same on all ranks."""
    with run.running(module, "fit", data):
        _note_hooks(run, module, "find_batch_size")
        loader = sources.training_loader(data, module)
        run.training_feed(loader)
        args = (module, loader, run.plan.device, run.plan.precision.name, run.data_replicas)
        with activation_checkpointing.applied(module, run.checkpointing):
            size, why = trials.find_batch_size(*args)
    run.console.say(f"the largest batch that fits on every device: {size}{why}")
    return size


def find_learning_rate(
    run: RankRun, module: TrainingModule, data: sources.Data, rates: list[float]
) -> float:
    """The rate at which the loss falls most steeply, the same on all ranks."""
    options, request = run.plan.options, run.plan.request
    with run.running(module, "fit", data):
        _note_hooks(run, module, "find_learning_rate")
        run.start_from_weights(module)
        feed = run.training_feed(sources.training_loader(data, module))
        with activation_checkpointing.applied(module, run.checkpointing):
            tried = trials.try_rates(module, feed, run.plan.device, options, rates)
    if run.is_global_zero:
        path = run_directory.create(request.root, request.name) / "learning_rates.csv"
        lines = [",".join(map(repr, row)) + "\n" for row in tried]
        files.write_atomically(path, "".join(["lr,loss,initial_loss\n", *lines]))
        run.console.say(f"learning rates and losses: {run.plan.shown(path)}")
    rate = trials.suggest(tried)
    run.console.say(f"the loss falls most steeply at the learning rate {rate:.3g}")
    return rate
