"""``Trainer``: checks all arguments, selects the strategy, launches ranks and runs the loop.

The top of the package: the only file that imports all parts.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from . import launch
from .checkpoint import BEST, LAST, find_link
from .data import Data, randomness, sources
from .errors import ConfigurationError, Problems
from .launch import outcome, signals
from .launch.signals import Interrupted
from .loop.trials import Sweep
from .memory import meta_device
from .module import Loaders, TrainingModule
from .options import Options, paths, values
from .options.reading import explains_keywords, takes
from .run import announcements, device_choice, environment, plan, process
from .run.process import Command
from .run.rank import RankRun, RunResult


@explains_keywords
class Trainer:
    """Trains a module with any strategy.

    Its keywords are the fields of :class:`~.options.Options`, with their types, defaults and help.

    Raises:
        ConfigurationError: One line for each error in the arguments.
    """

    @takes(Options)
    def __init__(self, options: Options, problems: Problems) -> None:
        # Not checks: the checks below read the variables that this leaves.
        launch.drop_inherited_variables()
        environment.warn()
        self._plan = plan.make(options, problems)
        self._last = RunResult()
        self.configuration: str | None = None
        announcements.warn_of_hidden_gpus(self._plan)
        randomness.use_deterministic_algorithms(options.deterministic)
        randomness.seed_everything(options.seed)

    def building(self) -> AbstractContextManager[object]:
        """Context in which to create a module: with ``meta_device``, on the meta device.

        Example::

            with trainer.building():
                module = LanguageModel(layers=96)
            trainer.fit(module, data)
        """
        return meta_device.building() if self._plan.options.meta_device else nullcontext()

    def fit(
        self, module: TrainingModule, data: Data = None, val_dataloader: Loaders | None = None
    ) -> None:
        """Train a module.

        If several processes are needed and no launcher has started them, they are started: by
        ``ddp``, as copies of this command, which this process monitors, and exits with; by
        ``ddp_spawn`` and ``ddp_fork``, for this call only, after which the trained weights are in
        the module.

        Args:
            module: The module to train.
            data: A data module, or a loader of training batches; default: the module's loaders.
            val_dataloader: Loader of validation batches, or a dict of them by name, if ``data`` is
                a loader.

        Raises:
            UserError: An error the user can fix; one line each.
            RankError: A process that was started has failed.
            KeyboardInterrupt: SIGINT (Ctrl-C) ended the fit after a checkpoint was saved; the
                message says how to resume. A second SIGINT does not wait for the save.
        """
        self.check_fit(module)
        sources.check_given(data, is_training=True)
        sources.check_given(val_dataloader)
        if val_dataloader is not None:
            sources.check(module, "validation_step")
        command = partial(RankRun.fit, module=module, data=data, val_dataloader=val_dataloader)
        try:
            self._last = self._launch(module, command)
        except Interrupted as interrupted:
            directory = self._plan.started_in / interrupted.directory
            self._last = RunResult(global_step=interrupted.step, run_directory=directory)
            line = str(interrupted) * (self.is_global_zero and not launch.is_reported())
            signals.hide_traceback(Interrupted, line, signals.INTERRUPTED_CODE)
            raise

    def check_fit(self, module: TrainingModule) -> None:
        """Check what only training requires, and what this module requires.

        Raises:
            ConfigurationError: One line per error.
        """
        plan.check_module(self._plan, module)

    def validate(
        self,
        module: TrainingModule,
        data: Data = None,
        checkpoint: str | None = None,
        *,
        averaged: bool = True,
    ) -> dict[str, float]:
        """Validate a module.

        Args:
            module: The module.
            data: A data module, a loader of batches, or a dict of loaders by name; default: the
                module's loaders.
            checkpoint: A checkpoint or run directory whose weights are used; ``"best"`` or
                ``"last"`` of the last ``fit``; default: the module's own weights.
            averaged: Use the average (EMA) of a checkpoint that has one; False: the weights of
                training.

        Returns:
            The logged values; with loaders in a dict, by names such as ``val_loss/clean``.
        """
        sources.check(module, "validation_step")
        sources.check_given(data)
        if not self._plan.options.limit_val_batches:
            raise ConfigurationError("limit_val_batches=0: there is nothing to validate")
        weights = self._weights(checkpoint, averaged)
        command = partial(RankRun.evaluate, stage="validation", module=module, data=data, **weights)
        return cast(dict[str, float], self._result(module, command))

    def test(
        self,
        module: TrainingModule,
        data: Data = None,
        checkpoint: str | None = None,
        *,
        averaged: bool = True,
    ) -> dict[str, float]:
        """Test a module, with arguments and result as in :meth:`validate`."""
        sources.check(module, "test_step")
        sources.check_given(data)
        weights = self._weights(checkpoint, averaged)
        command = partial(RankRun.evaluate, stage="test", module=module, data=data, **weights)
        return cast(dict[str, float], self._result(module, command))

    def predict(
        self,
        module: TrainingModule,
        data: Data = None,
        checkpoint: str | None = None,
        *,
        averaged: bool = True,
    ) -> Any:
        """Predict, with arguments as in :meth:`validate`.

        Returns:
            A list with one entry per batch, with tensors of all ranks in the dataset's order; with
            loaders in a dict, a dict of such lists.
        """
        sources.check(module, "predict_step")
        sources.check_given(data)
        weights = self._weights(checkpoint, averaged)
        command = partial(RankRun.predict, module=module, data=data, **weights)
        return self._result(module, command)

    def find_batch_size(self, module: TrainingModule, data: Data = None) -> int:
        """Find the largest batch on which a device can train, the same on all processes.

        Runs real training steps on a copy of the module, with increasing batch sizes.
        """
        sources.check(module, "training_step", "configure_optimizers")
        sources.check_given(data, is_training=True)
        if self._plan.strategy.compiles_steps:
            raise ConfigurationError(
                f"find_batch_size: strategy={self._plan.strategy_name!r} compiles a step for each "
                "batch size, and shows what fits only when it runs; try global_batch_size with fit"
            )
        command = partial(RankRun.find_batch_size, module=module, data=data)
        return cast(int, self._result(module, command))

    def find_learning_rate(
        self,
        module: TrainingModule,
        data: Data = None,
        *,
        lowest: float = 1e-7,
        highest: float = 1.0,
        steps: int = 100,
    ) -> float:
        """Find the learning rate at which the loss falls most steeply, the same on all processes.

        Trains a copy of the module at a rate that grows from step to step, until the loss diverges.
        Writes rates and losses to ``learning_rates.csv`` of a run directory.
        """
        sweep = Sweep(lowest, highest, steps)
        sources.check(module, "training_step", "configure_optimizers")
        sources.check_given(data, is_training=True)
        plan.check_sweep(self._plan, module)
        command = partial(RankRun.find_learning_rate, module=module, data=data, sweep=sweep)
        return cast(float, self._result(module, command))

    @property
    def global_step(self) -> int:
        """Number of optimizer steps of the last ``fit``."""
        return self._last.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch at the end of the last ``fit``, counted from 0."""
        return self._last.current_epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The latest logged values."""
        return self._last.metrics

    @property
    def run_directory(self) -> Path | None:
        """The run directory of the last ``fit``."""
        return self._last.run_directory

    @property
    def default_root_dir(self) -> Path:
        """Directory that contains run directories, with ``~`` and variables expanded."""
        return self._plan.request.root

    @property
    def global_rank(self) -> int:
        """The global rank of this process."""
        return self._plan.layout.rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process with global rank 0."""
        return self.global_rank == 0

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._plan.layout.world_size

    def _weights(self, checkpoint: Any, averaged: Any) -> dict[str, Any]:
        """The arguments of an evaluation that say which weights it uses, checked."""
        if not isinstance(averaged, bool):
            raise ConfigurationError(values.refusal("averaged", averaged, bool))
        if checkpoint is None and not averaged:
            raise ConfigurationError("averaged=False: only for a checkpoint, and none is given")
        expected = str | os.PathLike[str] | None
        if not values.fits(expected, checkpoint):
            raise ConfigurationError(values.refusal("checkpoint", checkpoint, expected))
        path: Path | None = None
        if checkpoint in (BEST, LAST):
            if self._last.run_directory is None:
                raise ConfigurationError(
                    f"checkpoint={checkpoint!r}: nothing was trained here; give the path "
                    f"runs/RUN/{checkpoint}"
                )
            path = find_link(self._last.run_directory, checkpoint)
        elif checkpoint is not None:
            path = Path(paths.expand("checkpoint", checkpoint))
        # Absolute: user code may change the working directory.
        return {"checkpoint": str(path.absolute()) if path else None, "averaged": averaged}

    def _result(self, module: TrainingModule, command: Command) -> Any:
        """Run a command other than ``fit``; the state of the last ``fit`` is kept."""
        result = self._launch(module, command)
        metrics = result.metrics or self._last.metrics
        self._last = replace(self._last, metrics=metrics)
        return result.value

    def _launch(self, module: TrainingModule, command: Command) -> RunResult:
        own = self._plan
        outcome.make_path_absolute(own.started_in)
        processes, launcher = own.local_processes, own.strategy.launcher
        if processes == 1 or own.layout.started_outside:
            return process.run(own, self.configuration, command)
        if launcher == "subprocess":
            if own.options.auto_select_gpus:
                device_choice.pass_to_ranks(own.node_devices)
            launch.supervise_copies(processes, own.layout, own.started_in)
        started = partial(process.run_started, own, self.configuration, command, module)
        names = {"model": module, **command.keywords, "trainer": own}
        result: RunResult = launch.run_in_processes(launcher, processes, started, names)
        module.load_state_dict(result.weights or {})
        return result
