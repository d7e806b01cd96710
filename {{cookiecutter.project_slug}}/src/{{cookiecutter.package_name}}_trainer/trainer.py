"""``Trainer``: checks all arguments, selects the strategy, launches ranks and runs the loop.

The top of the package: the only file that imports all parts.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from . import errors
from .checkpoint import Checkpoint, fill_module, run_choice
from .checkpoint.run_directory import LAST, find_link, is_link
from .data import randomness, sources
from .data.sources import Data
from .errors import ConfigurationError, EarlyExit, Problems, TemporaryError, UserError, refuse
from .launch import cluster, failures, hangs, reports, signals
from .launch.devices import backends_set
from .launch.rank import drop_inherited_variables, run_external
from .loop.position import Position
from .module import DataModule, Loaders, TrainingModule, current_run
from .options import Options, values
from .options.reading import accepts_foreign, accepts_options
from .run import console, environment, plan, training
from .run import rank as run_rank
from .run.plan import Plan
from .run.rank import RankRun
from .strategies import registry

if TYPE_CHECKING:
    from .run.commands import Evaluation

Command = partial[Any]  # a function of a :class:`~.run.rank.RankRun`, with the user's arguments


@dataclass(frozen=True)
class RunResult:
    value: Any = None  # what its command returns
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    run_directory: Path | None = None
    weights: Mapping[str, Any] | None = None  # the module's, if another process trained it
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # those that are in no state_dict


class Trainer(current_run.RunProperties, current_run.OptionNames):
    """Trains a module with any strategy.

    Its keywords are the fields of :class:`~.options.Options`, with their types, defaults and help.

    Raises:
        ConfigurationError: One line for each error in the arguments.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        never = {name: advice for name in vars(cls) if (advice := errors.instead("subclass", name))}
        refuse([f"{cls.__name__}.{name} would not be called{never[name]}" for name in never])

    @accepts_options(Options)
    def __init__(self, options: Options, problems: Problems) -> None:
        drop_inherited_variables()  # no check: those below read the variables that this leaves
        environment.warn()
        self.configuration: str | None = None
        self._last = RunResult()
        self._fitted: tuple[TrainingModule, DataModule | None] | None = None
        self._plan = plan.make(options, problems)
        console.warn_of_unused(self._plan)
        if run_rank.RUNNING.locked():  # its random numbers would begin again
            raise UserError(run_rank.SHARED)
        randomness.seed_generators(options.seed)

    def building(self) -> AbstractContextManager[object]:
        """Context in which to create a module: with ``meta_device``, on the meta device.

        Example::

            with trainer.building():
                module = LanguageModel(layers=96)
            trainer.fit(module, data)
        """
        return self._plan.building()

    @accepts_foreign
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
        command = partial(training.fit, module=module, data=data, val_dataloader=val_dataloader)
        self._fitted = module, data if isinstance(data, DataModule) else None
        self._last = RunResult()
        try:
            self._last = self._launch(module, command)
        except signals.Interrupted as interrupted:
            directory = self._plan.started_in / interrupted.directory
            position = Position(global_step=interrupted.step)
            self._last = replace(self._last, position=position, run_directory=directory)
            line = str(interrupted) * (self.is_global_zero and not reports.is_reported())
            signals.hide_traceback(signals.Interrupted, line, signals.INTERRUPTED_CODE)
            raise

    def check_fit(self, module: TrainingModule) -> None:
        """Check what only training requires, and what this module requires.

        Raises:
            ConfigurationError: One line per error.
        """
        plan.check_module(self._plan, module)

    @accepts_foreign
    def validate(
        self,
        module: TrainingModule | None = None,
        data: Data = None,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        averaged: bool = True,
    ) -> dict[str, float]:
        """Validate a module.

        Args:
            module: The module; default: that of the last ``fit``.
            data: A data module, a loader of batches, or a dict of loaders by name; default: the
                module's loaders.
            checkpoint: A checkpoint or run directory whose weights are used; ``"best"``,
                ``"best-VALUE"`` or ``"last"`` of the last ``fit``; default: the module's own.
            averaged: Use the average (EMA) of a checkpoint that has one; False: the weights of
                training.

        Returns:
            The logged values; with loaders in a dict, by names such as ``val_loss/clean``.
        """
        if not self._plan.options.limit_val_batches:
            raise ConfigurationError("limit_val_batches=0: there is nothing to validate")
        logs = self._evaluate("validation", module, data, checkpoint=checkpoint, averaged=averaged)
        return cast(dict[str, float], logs)

    @accepts_foreign
    def test(
        self,
        module: TrainingModule | None = None,
        data: Data = None,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        averaged: bool = True,
    ) -> dict[str, float]:
        """Test a module, with arguments and result as in :meth:`validate`."""
        metrics = self._evaluate("test", module, data, checkpoint=checkpoint, averaged=averaged)
        return cast(dict[str, float], metrics)

    @accepts_foreign
    def predict(
        self,
        module: TrainingModule | None = None,
        data: Data = None,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        averaged: bool = True,
    ) -> Any:
        """Predict, with arguments as in :meth:`validate`.

        Returns:
            A list of what ``predict_step`` returned for each batch, those of all ranks in the
            dataset's order, with tensors on the CPU; with loaders in a dict, a dict of such lists.
        """
        return self._evaluate("predict", module, data, checkpoint=checkpoint, averaged=averaged)

    def find_batch_size(self, module: TrainingModule, data: Data = None) -> int:
        """Find the largest batch on which a device can train, the same on all processes.

        Runs real training steps on a copy of the module, with increasing batch sizes.
        """
        sources.check(module, "training_step", "configure_optimizers")
        sources.check_given(data, is_training=True)
        if "compile" in self._plan.strategy.limits.always:
            raise ConfigurationError(
                f"find_batch_size: strategy={self._plan.strategy_name!r} compiles a step for each "
                "batch size, and shows what fits only when it runs; try global_batch_size with fit"
            )
        from .run import commands

        command = partial(commands.find_batch_size, module=module, data=data)
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
        from .loop import trials
        from .run import commands

        rates = trials.rates(lowest, highest, steps)
        run_choice.check_root(self._plan.request.root)
        sources.check(module, "training_step", "configure_optimizers")
        sources.check_given(data, is_training=True)
        refuse(trials.problems_of(self._plan.strategy_name, self._plan.strategy, module))
        command = partial(commands.find_learning_rate, module=module, data=data, rates=rates)
        return cast(float, self._result(module, command))

    @property
    def metrics(self) -> dict[str, float]:
        """The latest logged values."""
        return self._now().metrics

    @property
    def run_directory(self) -> Path | None:
        """The run directory of the last ``fit``."""
        return self._now().run_directory

    @property
    def default_root_dir(self) -> Path:
        """Directory that contains run directories, with ``~`` and variables expanded."""
        return self._plan.request.root

    def _now(self) -> RunResult:
        """The state of the fit that runs in this process, else of the last one."""
        rank = run_rank.current
        if rank is None or rank.loop is None or rank.plan.options is not self._plan.options:
            return self._last
        return _result_of(rank)

    def _run_facts(self) -> current_run.RunFacts:
        position = self._now().position
        return current_run.RunFacts(self._plan.layout, position.global_step, position.epoch)

    def _evaluate(
        self, kind: "Evaluation", module: TrainingModule | None, data: Data, **of: Any
    ) -> Any:
        if module is None:
            if self._fitted is None:
                raise ConfigurationError("no module was given, and this trainer has fitted none")
            module, data = self._fitted[0], self._fitted[1] if data is None else data
        sources.check(module, f"{kind}_step")
        sources.check_given(data)
        of["checkpoint"] = self._checkpoint(**of)
        from .run import commands

        of["trained"] = self._last.position
        command = partial(commands.evaluate, kind=kind, module=module, data=data, **of)
        return self._result(module, command)

    def _checkpoint(self, checkpoint: Any, averaged: Any) -> str | None:
        """The absolute path of a checkpoint, because user code may change the directory."""
        if not isinstance(averaged, bool):
            raise ConfigurationError(values.refusal("averaged", averaged, bool))
        values.fitting("checkpoint", str | os.PathLike[str] | None, checkpoint)
        if checkpoint is None:
            if not averaged:
                raise ConfigurationError("averaged=False: only for a checkpoint, and none is given")
            return None
        if not is_link(checkpoint):
            return str(Path(values.expand_path("checkpoint", checkpoint)).absolute())
        if self._last.run_directory is None:
            advice = f"nothing was trained here; give the path runs/RUN/{checkpoint}"
            raise ConfigurationError(f"checkpoint={checkpoint!r}: {advice}")
        return str(find_link(self._last.run_directory, str(checkpoint)).absolute())

    def _result(self, module: TrainingModule, command: Command) -> Any:
        """Run a command other than ``fit``; the state of the last ``fit`` is kept."""
        result = self._launch(module, command)
        self._last = replace(self._last, metrics=result.metrics or self._last.metrics)
        return result.value

    def _launch(self, module: TrainingModule, command: Command) -> RunResult:
        if not run_rank.RUNNING.acquire(blocking=False):
            run_rank.OTHERS.set()
            raise UserError(run_rank.SHARED)
        try:
            run_rank.OTHERS.clear()
            return self._launch_alone(module, command)
        finally:
            run_rank.RUNNING.release()

    def _launch_alone(self, module: TrainingModule, command: Command) -> RunResult:
        plan = self._plan
        reports.make_outcome_absolute(plan.started_in)
        processes, launcher = plan.local_processes, plan.strategy.limits.launcher
        if processes == 1 or plan.layout.started_outside:
            rank = RankRun(plan, self.configuration, is_started=False)
            try:
                return _run(rank, command)
            finally:
                if rank.loop is not None:  # of a fit, which a script may end by an error
                    self._last = _result_of(rank)
        from .launch import start

        if launcher == "subprocess":
            if plan.options.auto_select_gpus:
                # The copies of this command use the GPUs that were selected here.
                gpus = (str(device.index) for device in plan.node_devices)
                os.environ[environment.GPUS] = ",".join(gpus)
            start.supervise_copies(processes, plan.layout, plan.started_in)
        started = partial(_run_started, plan, self.configuration, command, module)
        names = {"model": module, **command.keywords, "trainer": plan}
        try:
            result: RunResult = start.run_in_processes(launcher, processes, started, names)
        except signals.Interrupted as interrupted:  # the ranks have saved what they trained
            saved = Checkpoint(find_link(plan.started_in / interrupted.directory, LAST))
            fill_module(module, saved.weights(averaged=False)[0])
            raise
        module.load_state_dict(result.weights or {})
        for name, value in result.buffers.items():
            layer, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(layer), attribute, value)
        return result


# --- in the process of a rank --------------------------------------------------------------------


def _result_of(rank: RankRun, value: Any = None) -> RunResult:
    return RunResult(value, rank.position, dict(rank.metrics), rank.directory)


def _run(rank: RankRun, command: Command) -> RunResult:
    """Run a command as the rank that this process is: connect to the peers, run, disconnect."""
    plan = rank.plan

    def work() -> RunResult:
        run_rank.current = rank
        kind = command.keywords.get("kind", "fit")
        rank.connect("validate" if kind == "validation" else kind)
        try:
            value = command(rank)
        except (OSError, RuntimeError) as error:
            if (line := failures.failure_of_machine(error, plan.request.root)) is None:
                raise
            raise TemporaryError(line) from None
        except SystemExit as error:
            if error.code:
                raise  # the exit code shows the failure, or the signal
            place = hangs.of_error(error).rpartition("\n")[2].strip()
            raise EarlyExit(
                f"user code called sys.exit({error.code}) in step {rank.global_step + 1}, before "
                f"{command.func.__name__} ended ({place}): return instead, or raise an error"
            ) from error
        finally:
            run_rank.current = None
        return _result_of(rank, value)

    deterministic = randomness.deterministic_algorithms(plan.options.deterministic)
    backends = backends_set(plan.device.type, plan.options)
    with deterministic, backends, torch.inference_mode(False), torch.enable_grad():
        lost_peer = registry.lost_peer_errors
        return run_external(work, plan.strategy.teardown, lost_peer, rank.teardown_may_hang)


def _run_started(
    plan: Plan, configuration: str | None, command: Command, module: TrainingModule
) -> RunResult:
    """Run a command in a process that was started for it; the result includes the weights."""
    here = replace(plan, layout=cluster.detect())
    result = _run(RankRun(here, configuration, is_started=True), command)
    weights = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }
    buffers = {name: b.cpu() for name, b in module.named_buffers() if name not in weights}
    return replace(result, weights=weights, buffers=buffers)
