"""``Trainer``: checks every argument together, picks the strategy, launches, runs the loop.

The only place that knows everybody.
"""

import inspect
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from . import launch
from .arguments import legacy, paths, values
from .data import randomness, sources
from .data.sources import Data
from .errors import ConfigurationError, EarlyExit
from .launch import interruption, outcome
from .launch.devices import gpu_backends
from .launch.failures import stacks
from .launch.interruption import Interrupted
from .launch.preemption import Preempted
from .memory import meta_device
from .module import Loader, TrainingModule
from .run import plan
from .run.plan import Arguments
from .run.rank import Outcome, RankRun
from .strategies import Strategy

_Command = partial[Any]  # of a method of RankRun: its keywords are what the user gave


class Trainer:
    """Trains a module under any strategy.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``.
        devices: how many, or which: ``2``, ``"0,2"``, ``[0, 2]``, ``-1`` or ``"auto"`` for all. On
            CPUs, processes.
        num_nodes: to check what srun or torchrun has started; by default whatever that is. Where
            this command is started once on each node (``NODE_RANK``), how many there are.
        strategy: a registered name, a class path, ``"auto"``, or a strategy.
        strategy_options: arguments of a strategy that is given by name.
        precision: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"``, by autocast; ``"bf16-true"``
            or ``"16-true"``: parameters, buffers and batches too, without a scaler of gradients.
        matmul_precision: of float32 matrix products on GPUs: ``"highest"`` (float32), ``"high"``
            (TF32) or ``"medium"``, as ``torch.set_float32_matmul_precision`` takes them; by default
            ``"high"``, or what the program has set itself. On CPUs nothing is changed.
        max_epochs: passes over the data; ``None``: until ``max_steps``.
        max_steps: optimizer steps; ``None``: until ``max_epochs``.
        global_batch_size: samples of an optimizer step over all devices; replaces the batch size
            of the training loader, so that the same run fits any number of devices.
        accumulate_grad_batches: micro-batches of an optimizer step.
        gradient_clip_val: bound of the gradients; ``None``: no clipping.
        gradient_clip_algorithm: ``"norm"`` (of all together) or ``"value"`` (each).
        learning_rate_scaling: multiply rates as the effective batch grows: ``"none"``,
            ``"linear"`` or ``"sqrt"``.
        reference_batch_size: effective batch size that the rates were chosen for; by default what
            one device reads.
        learning_rate_warmup_steps: steps over which a scaled rate grows to its end.
        sync_batchnorm: normalize over the batches of all processes.
        compile: compile the module's ``forward`` with ``torch.compile``; or its options, in a dict:
            ``mode`` (``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"``), ``dynamic`` (shapes that change), and ``regional``:
            compile repeated blocks, each class once, or the parts that a list names as
            ``activation_checkpointing`` does. With that option each part that it names is compiled.
        activation_checkpointing: parts of the module that compute their activations again in
            backward rather than keep them: names of classes (``"Block"``), or paths, in which
            ``*`` stands for a name (``"network.layers.*"``).
        seed: fixes data order, workers, augmentation and, where the module is made after the
            trainer, its weights.
        meta_device: parameters of modules made within :meth:`building` have no memory until a
            strategy gives it to them, piece by piece where it divides them; the command line makes
            modules so. What they begin with is said by ``initialize`` of the module.
        deterministic: use only kernels that give the same bits each time.
        cudnn_benchmark: have cuDNN try its algorithms for each new shape of a convolution, and keep
            the fastest; by default on GPUs, unless ``deterministic``. False: for shapes that change
            from batch to batch.
        use_distributed_sampler: put in the trainer's order of samples. False: loaders are read
            as they are.
        uneven_inputs: where loaders that are read as they are give the ranks different numbers of
            batches: ``"refuse"``, or ``"join"``: each sample still counts once.
        log_every_n_steps: log every N optimizer steps; the first and the last one are logged too.
        check_val_every_n_epoch: run validation every N epochs.
        val_every_n_steps: run validation every N optimizer steps, too.
        checkpoint_every_n_steps: save every N optimizer steps, besides after each epoch.
        keep_checkpoints: how many to keep, at least 2.
        stop_on_nonfinite_loss: end the fit with an error after a step whose loss is NaN or
            infinite, and save no parameters that are; with a gradient scaler (``"16-mixed"``) such
            steps are skipped, and the fit ends when its scale falls below 1e-4.
        async_checkpoints: write them while training goes on.
        resume: a run's directory or a checkpoint to resume from; ``"auto"``: the newest checkpoint
            of ``run_name``, which must be given, or a new run if there is none.
        default_root_dir: where runs lie.
        run_name: directory of the run in it; by default the time. One in which there is a run is
            refused, unless that is resumed or overwritten.
        overwrite: remove the run that is in the directory, once the new one is ready to begin.
        loggers: ``"csv"``, ``"tensorboard"``.
        enable_progress_bar: show step, loss, rate and time left.
        auto_select_gpus: where ``devices`` is a number: take GPUs that nobody else uses.
        gpus: older spelling of ``devices``, by its own table; ``None`` and 0 mean the CPU.
        num_processes: older spelling of ``devices`` on CPUs.
        tpu_cores: older spelling of ``devices`` on TPUs.
        plugins: older spelling of ``strategy``; so are ``accelerator="ddp"`` and its like.
        distributed_backend: older spelling of ``strategy``.
        replace_sampler_ddp: older spelling of ``use_distributed_sampler``.
        amp_backend: ``"native"``, which is all there is: apex has given up its own.
        resume_from_checkpoint: older spelling of ``resume``.
        logger: older spelling of ``loggers``.

    Raises:
        ConfigurationError: one line for every mistake in the arguments.
    """

    def __init__(
        self,
        *,
        accelerator: str | None = "auto",
        devices: int | str | list[int] | None = "auto",
        num_nodes: int | None = None,
        strategy: str | Strategy | None = "auto",
        strategy_options: dict[str, Any] | None = None,
        precision: int | str = "32-true",
        matmul_precision: str | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        global_batch_size: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        learning_rate_scaling: str = "none",
        reference_batch_size: int | None = None,
        learning_rate_warmup_steps: int = 0,
        sync_batchnorm: bool = False,
        compile: bool | dict[str, Any] = False,
        activation_checkpointing: Sequence[str] = (),
        seed: int = 0,
        meta_device: bool = False,
        deterministic: bool = False,
        cudnn_benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        uneven_inputs: str = "refuse",
        log_every_n_steps: int = 50,
        check_val_every_n_epoch: int = 1,
        val_every_n_steps: int | None = None,
        checkpoint_every_n_steps: int | None = None,
        keep_checkpoints: int = 2,
        stop_on_nonfinite_loss: bool = True,
        async_checkpoints: bool = False,
        resume: str | None = None,
        default_root_dir: str | os.PathLike[str] = "runs",
        run_name: str | None = None,
        overwrite: bool = False,
        loggers: Sequence[str] = ("csv", "tensorboard"),
        enable_progress_bar: bool = True,
        auto_select_gpus: bool = False,
        gpus: int | str | list[int] | None = legacy.NOT_GIVEN,
        num_processes: int | None = None,
        tpu_cores: int | str | list[int] | None = None,
        plugins: str | list[Any] | Strategy | None = None,
        distributed_backend: str | None = None,
        replace_sampler_ddp: bool | None = None,
        amp_backend: str | None = None,
        resume_from_checkpoint: str | None = None,
        logger: bool | str | list[str] | None = None,
    ) -> None:
        given = dict(locals())
        del given["self"]
        outcome.make_path_absolute()
        self._checked = plan.check(given, _DEFAULTS, _TYPES)
        self._outcome = Outcome()
        self.configuration: str | None = None
        randomness.use_deterministic_algorithms(deterministic)
        randomness.seed_everything(seed)

    def building(self) -> AbstractContextManager[object]:
        """What to make a module within: with ``meta_device`` its parameters have no memory yet.

        Example::

            with trainer.building():
                module = LanguageModel(layers=96)
            trainer.fit(module, data)
        """
        return meta_device.building() if self._checked.given["meta_device"] else nullcontext()

    def fit(
        self, module: TrainingModule, data: Data = None, val_dataloader: Loader | None = None
    ) -> None:
        """Train.

        Where several processes are needed and nothing has started them, they are started: by
        ``ddp``, as copies of this command, which this process watches and ends with; by
        ``ddp_spawn`` and ``ddp_fork``, for this call alone, after which the trained weights are in
        the module.

        Args:
            module: what to train.
            data: a data module, or a loader of training batches; by default the module's loaders.
            val_dataloader: validation batches, where ``data`` is a loader.

        Raises:
            UserError: something the user can mend; one line each.
            RankError: a process that was started has failed.
            KeyboardInterrupt: SIGINT (Ctrl-C) has ended the fit, which saved first; its text says
                how to resume. A second SIGINT does not wait for that.
        """
        self.check_fit(module)
        sources.check_given(data, val_dataloader)
        if val_dataloader is not None:
            sources.check(module, "validation_step")
        command = partial(RankRun.fit, module=module, data=data, val_dataloader=val_dataloader)
        try:
            self._outcome = self._launch(module, command)
        except Interrupted as interrupted:
            directory = self._checked.started_in / interrupted.directory
            self._outcome = Outcome(global_step=interrupted.step, run_directory=directory)
            prints = interruption.is_main_rank() and not launch.is_reported()
            interruption.hide_traceback(interrupted, prints)
            raise

    def check_fit(self, module: TrainingModule) -> None:
        """Check what only training needs, and what this module asks.

        Raises:
            ConfigurationError: one line for every mistake.
        """
        self._checked.check_module(module)

    def validate(
        self, module: TrainingModule, data: Data = None, checkpoint: str | None = None
    ) -> dict[str, float]:
        """Validate, with the weights of a checkpoint or run directory, or else the module's own."""
        sources.check(module, "validation_step")
        sources.check_given(data)
        checkpoint = _expanded(checkpoint)
        command = partial(
            RankRun.evaluate, stage="validation", module=module, data=data, checkpoint=checkpoint
        )
        return cast(dict[str, float], self._result(module, command))

    def test(
        self, module: TrainingModule, data: Data = None, checkpoint: str | None = None
    ) -> dict[str, float]:
        """Test, with the weights of a checkpoint or run directory, or else the module's own."""
        sources.check(module, "test_step")
        sources.check_given(data)
        checkpoint = _expanded(checkpoint)
        command = partial(
            RankRun.evaluate, stage="test", module=module, data=data, checkpoint=checkpoint
        )
        return cast(dict[str, float], self._result(module, command))

    def predict(
        self, module: TrainingModule, data: Data = None, checkpoint: str | None = None
    ) -> list[Any]:
        """Predict; one entry a batch, tensors of all processes in the data set's order."""
        sources.check(module, "predict_step")
        sources.check_given(data)
        checkpoint = _expanded(checkpoint)
        command = partial(RankRun.predict, module=module, data=data, checkpoint=checkpoint)
        return cast(list[Any], self._result(module, command))

    def find_batch_size(self, module: TrainingModule, data: Data = None) -> int:
        """The largest batch that a device can train on, agreed over all processes.

        Tries real training steps, on a copy of the module, on batches of growing size.
        """
        sources.check(module, "training_step", "configure_optimizers")
        sources.check_given(data)
        command = partial(RankRun.find_batch_size, module=module, data=data)
        return cast(int, self._result(module, command))

    @property
    def global_step(self) -> int:
        """Optimizer steps that the last ``fit`` made."""
        return self._outcome.global_step

    @property
    def current_epoch(self) -> int:
        """The epoch that the last ``fit`` stood in, from 0."""
        return self._outcome.current_epoch

    @property
    def metrics(self) -> dict[str, float]:
        """The newest logged values."""
        return self._outcome.metrics

    @property
    def run_directory(self) -> Path | None:
        """Where the last ``fit`` lies."""
        return self._outcome.run_directory

    @property
    def default_root_dir(self) -> Path:
        """Where runs are, with ``~`` and variables of the environment replaced."""
        return self._checked.request.root

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._checked.layout.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._checked.layout.world_size

    def _result(self, module: TrainingModule, command: _Command) -> Any:
        """What a command other than ``fit`` gives; what the last ``fit`` left stays."""
        outcome = self._launch(module, command)
        metrics = outcome.metrics or self._outcome.metrics
        self._outcome = replace(self._outcome, metrics=metrics)
        return outcome.result

    def _launch(self, module: TrainingModule, command: _Command) -> Outcome:
        checked = self._checked
        processes = checked.local_processes
        if processes == 1 or checked.layout.started_outside:
            return _run_rank(checked, self.configuration, command)
        if checked.strategy.launcher == "subprocess":
            launch.supervise_copies(processes, checked.layout, checked.started_in)
        started = partial(_run_started_rank, checked, self.configuration, command, module)
        names = {"model": module, **command.keywords, "trainer": checked}
        outcome: Outcome = launch.run_in_processes(
            checked.strategy.launcher, processes, started, names
        )
        module.load_state_dict(outcome.weights or {})
        return outcome


def _expanded(checkpoint: Any) -> str | None:
    """An absolute path of a checkpoint, with ``~`` and variables replaced."""
    expected = str | os.PathLike[str] | None
    if not values.fits(expected, checkpoint):
        raise ConfigurationError(values.refusal("checkpoint", checkpoint, expected))
    if checkpoint is None:
        return None
    # User code may change the working directory.
    return str(Path(paths.expand("checkpoint", checkpoint)).absolute())


_TYPES = values.hints(Trainer)
_DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()
}


def _run_rank(checked: Arguments, configuration: str | None, command: _Command) -> Outcome:
    run = RankRun(checked, configuration)

    def work() -> Outcome:
        run.connect()
        try:
            return run.outcome(command(run))
        except Preempted:
            raise
        except SystemExit as error:
            if error.code:
                raise  # whoever has started this sees that it failed
            place = stacks.of_error(error).rpartition("\n")[2].strip()
            raise EarlyExit(
                f"user code called sys.exit({error.code}) in step {run.global_step + 1}, before "
                f"{command.func.__name__} ended ({place}): return instead, or raise an error"
            ) from error

    strategy = checked.strategy
    with gpu_backends.applied(checked.device.type, checked.given):
        return launch.run_external(
            work, strategy.teardown, strategy.waits_for_peers, strategy.lost_peer_errors
        )


def _run_started_rank(
    checked: Arguments, configuration: str | None, command: _Command, module: TrainingModule
) -> Outcome:
    outcome = _run_rank(checked.placed(), configuration, command)
    weights = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }
    return replace(outcome, weights=weights)
