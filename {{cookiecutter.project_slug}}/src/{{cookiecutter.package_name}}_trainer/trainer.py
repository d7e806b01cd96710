"""``Trainer``: checks all arguments, selects the strategy, launches ranks and runs the loop.

The top of the package: the only file that imports all parts.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from . import launch
from .arguments import legacy, paths, values
from .arguments.keywords import Keywords, collects_keywords, explains_keywords
from .arguments.plugin import Plugin
from .checkpoint import BEST, LAST, find_link
from .data import Data, randomness, sources
from .errors import ConfigurationError
from .launch import outcome, signals
from .launch.signals import Interrupted
from .loop.trials import Sweep
from .memory import meta_device
from .module import Loaders, TrainingModule
from .run import announcements, device_choice, environment, plan, process
from .run.process import Command
from .run.rank import RankRun, RunResult
from .strategies import Strategy


@explains_keywords
class Trainer:
    """Trains a module with any strategy.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, or an engine's, such as ``"tpu"``.
        devices: Number of devices, or which: ``2``, ``"0,2"``, ``[0, 2]``; ``-1`` or ``"auto"`` for
            all. On CPUs, the number of processes.
        num_nodes: Number of nodes, to check the launch by srun or torchrun, which is the default.
            Required if this command is started once per node (``NODE_RANK``).
        strategy: A registered name, a class path, ``"auto"``, or a ``Strategy`` object.
        strategy_options: Arguments of a strategy that is given by name.
        precision: ``"32-true"``; ``"bf16-mixed"`` or ``"16-mixed"`` (autocast); ``"bf16-true"`` or
            ``"16-true"`` (parameters, buffers and batches in half precision, without a gradient
            scaler).
        matmul_precision: Precision of float32 matrix products on GPUs: ``"highest"`` (float32),
            ``"high"`` (TF32) or ``"medium"``, as in ``torch.set_float32_matmul_precision``;
            default: ``"high"``, or the program's own setting. No effect on CPUs.
        max_epochs: Maximum number of epochs; ``None``: until ``max_steps`` or ``max_time``.
        max_steps: Maximum number of optimizer steps; ``None``: until ``max_epochs``.
        max_time: Maximum duration of training, including that of earlier attempts if the run was
            resumed: ``"DD:HH:MM:SS"``, a ``timedelta``, or its arguments as a dict.
        limit_train_batches: Batches of each replica per epoch, a multiple of
            ``accumulate_grad_batches``; or the fraction of an epoch's optimizer steps.
        limit_val_batches: Batches of the loader, divided among all replicas, or their fraction; 0:
            no validation.
        limit_test_batches: Likewise, in test.
        limit_predict_batches: Likewise, in prediction.
        overfit_batches: Train in each epoch on the same batches, and validate on their samples; a
            number or fraction as in ``limit_train_batches``; 0: off.
        fast_dev_run: Number of optimizer steps, and of validation batches, of a run that tries the
            code: one epoch, no checkpoints, no loggers. True: 1.
        global_batch_size: Samples per optimizer step over all devices; replaces the batch size of
            the training loader, so that a run gives the same result on any number of devices.
        accumulate_grad_batches: Micro-batches per optimizer step.
        gradient_clip_val: Maximum norm or value of gradients; ``None``: no clipping.
        gradient_clip_algorithm: ``"norm"`` (global norm) or ``"value"`` (each element).
        learning_rate_scaling: Scale learning rates with the effective batch size: ``"none"``,
            ``"linear"`` or ``"sqrt"``.
        reference_batch_size: Effective batch size for which the learning rates were chosen;
            default: the batch size of one device.
        learning_rate_warmup_steps: Linear warm-up steps to the scaled learning rate.
        sync_batchnorm: Synchronize BatchNorm statistics over all ranks.
        compile: Compile the module's ``forward`` with ``torch.compile``; or a dict of options:
            ``mode`` (``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"``), ``dynamic`` (dynamic shapes), and ``regional``:
            compile repeated blocks, each class once, or the parts in a list of names. With
            ``activation_checkpointing``, the parts named there are compiled.
        activation_checkpointing: Parts of the module that recompute their activations in backward:
            names of classes (``"Block"``), or paths, in which ``*`` matches any name
            (``"network.layers.*"``).
        seed: Seed of data order, workers, augmentation and, if the module is created after the
            trainer, its weights.
        meta_device: Create the parameters of modules inside :meth:`building` on the meta device; a
            strategy allocates them, one part at a time if it shards them. The command line creates
            the module inside it. The module's ``initialize`` sets the initial values.
        deterministic: Use only deterministic kernels.
        cudnn_benchmark: Let cuDNN benchmark its algorithms for each new input shape of a
            convolution; default: on GPUs, unless ``deterministic``. Use False if shapes change
            from batch to batch.
        use_distributed_sampler: Use the trainer's order of samples. False: read loaders as they
            are.
        uneven_inputs: If loaders are read as they are, and yield different numbers of batches on
            different ranks: ``"refuse"``, or ``"join"``, so that each sample still counts once.
        log_every_n_steps: Log every N optimizer steps; the first and the last are logged too.
        log_gradient_norm: Log ``gradient_norm``, the norm over the whole model, also without
            clipping by norm, which computes it anyway.
        peak_flops: Peak floating-point operations per second of one device in this precision, from
            its data sheet; logs the part of it that is used (MFU) as ``speed/mfu``. The operations
            are the module's ``flops_per_sample``, or are counted by torch.
        check_val_every_n_epoch: Run validation every N epochs.
        val_every_n_steps: Also run validation every N optimizer steps.
        sanity_check: Validation batches of each replica to run before the first step of a new run,
            so that an error in validation is found at the start; 0: none. Nothing is logged.
        checkpoint_every_n_steps: Save a checkpoint every N optimizer steps, and at ends of epochs.
        checkpoint_every_n_epochs: Save a checkpoint at the end of every N-th epoch. The last step
            is always saved.
        keep_checkpoints: Number of checkpoints to keep, at least 2.
        callbacks: Callbacks of a fit: objects, class paths, names of built-in ones, or dicts with
            ``class_path`` and ``init_args``.
        nonfinite_loss: ``"stop"``: stop with an error after a step whose loss is NaN or infinite,
            and save no non-finite parameters. ``"skip"``: skip steps whose gradients are not
            finite, on all ranks, and stop after 30 in a row; reads a number from the device in
            each step. ``"rollback"``: restore weights and optimizers from the newest checkpoint,
            and continue with the next batches. With a gradient scaler (``"16-mixed"``) all
            skip such steps, until the scale falls below 1e-4. ``"ignore"``: no checks.
        async_checkpoints: Write checkpoints while training continues.
        resume: A run directory or a checkpoint to resume from; ``"auto"``: the newest checkpoint
            of ``run_name``, which is then required, or a new run if there is none.
        weights: Weights that a new run starts from, with new optimizers, at step 0: a run directory
            or a checkpoint, whose average (EMA) is used if it has one; or a ``.safetensors`` file,
            or a directory of them. A run that is resumed does not use it.
        weights_strict: Whether names and shapes must be those of the module. False: start from the
            weights that fit, and say which do not.
        default_root_dir: Directory that contains run directories.
        run_name: Name of the run directory; default: the time. A directory that contains a run is
            an error, unless it is resumed or overwritten.
        overwrite: Replace the existing run in the directory. It is kept in the folder
            ``overwritten`` there until the new run has saved a checkpoint.
        loggers: Loggers of a fit: ``"csv"``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, objects,
            class paths, or dicts with ``class_path``, ``init_args`` and ``name``.
        enable_progress_bar: Show step, loss, speed and remaining time. Without it only notes and
            warnings are printed, to stderr.
        auto_select_gpus: If ``devices`` is a number: select idle GPUs.
        gpus: Older spelling of ``devices``, with its own rules; ``None`` and 0 mean the CPU.
        num_processes: Older spelling of ``devices`` on CPUs.
        tpu_cores: Older spelling of ``devices`` on TPUs.
        plugins: Older spelling of ``strategy``, like ``accelerator="ddp"``; a name, or an object
            such as those in ``legacy.py``.
        distributed_backend: Older spelling of ``strategy``.
        replace_sampler_ddp: Older spelling of ``use_distributed_sampler``.
        num_sanity_val_steps: Older spelling of ``sanity_check``.
        amp_backend: Only ``"native"``: apex has removed its mixed precision.
        resume_from_checkpoint: Older spelling of ``resume``.
        logger: Older spelling of ``loggers``.

    Raises:
        ConfigurationError: One line for each error in the arguments.
    """

    @collects_keywords
    def __init__(
        self,
        *,
        accelerator: str | None = "auto",
        devices: int | str | list[int] | None = "auto",
        num_nodes: int | None = None,
        strategy: str | Strategy | Plugin | None = "auto",
        strategy_options: dict[str, Any] | None = None,
        precision: int | str = "32-true",
        matmul_precision: str | None = None,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: str | timedelta | dict[str, float] | None = None,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        overfit_batches: int | float = 0,
        fast_dev_run: bool | int = False,
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
        log_gradient_norm: bool = False,
        peak_flops: float | None = None,
        check_val_every_n_epoch: int = 1,
        val_every_n_steps: int | None = None,
        sanity_check: int = 1,
        checkpoint_every_n_steps: int | None = None,
        checkpoint_every_n_epochs: int = 1,
        keep_checkpoints: int = 2,
        callbacks: Sequence[Any] = (),
        nonfinite_loss: str = "stop",
        async_checkpoints: bool = False,
        resume: str | None = None,
        weights: str | os.PathLike[str] | None = None,
        weights_strict: bool = True,
        default_root_dir: str | os.PathLike[str] = "runs",
        run_name: str | None = None,
        overwrite: bool = False,
        loggers: Sequence[Any] = ("csv", "tensorboard"),
        enable_progress_bar: bool = True,
        auto_select_gpus: bool = False,
        gpus: int | str | list[int] | None = legacy.NOT_GIVEN,
        num_processes: int | None = None,
        tpu_cores: int | str | list[int] | None = None,
        plugins: str | list[Any] | Strategy | Plugin | None = None,
        distributed_backend: str | None = None,
        replace_sampler_ddp: bool | None = None,
        num_sanity_val_steps: int | None = None,
        amp_backend: str | None = None,
        resume_from_checkpoint: str | None = None,
        logger: bool | str | list[str] | None = None,
    ) -> None:
        """All keywords, with their types and defaults; they arrive in ``_configure``."""

    def _configure(self, keywords: Keywords) -> None:
        # Not checks: the checks below read the variables that this leaves.
        launch.drop_inherited_variables()
        environment.warn()
        self._plan = plan.make(keywords)
        self._last = RunResult()
        self.configuration: str | None = None
        announcements.warn_of_hidden_gpus(self._plan)
        randomness.use_deterministic_algorithms(self._plan.options.deterministic)
        randomness.seed_everything(self._plan.options.seed)

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
            prints = signals.is_main_rank() and not launch.is_reported()
            signals.show_as_one_line(interrupted, prints)
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
        return {"checkpoint": self._expanded(checkpoint), "averaged": averaged}

    def _expanded(self, checkpoint: Any) -> str | None:
        """The absolute path of a checkpoint, with ``~`` and variables expanded."""
        expected = str | os.PathLike[str] | None
        if not values.fits(expected, checkpoint):
            raise ConfigurationError(values.refusal("checkpoint", checkpoint, expected))
        if checkpoint is None:
            return None
        if checkpoint in (BEST, LAST):
            return str(self._linked(checkpoint).absolute())
        # User code may change the working directory.
        return str(Path(paths.expand("checkpoint", checkpoint)).absolute())

    def _linked(self, name: str) -> Path:
        """The best or the last checkpoint of the last ``fit``."""
        if (directory := self._last.run_directory) is None:
            raise ConfigurationError(
                f"checkpoint={name!r}: nothing was trained here; give the path runs/RUN/{name}"
            )
        return find_link(directory, name)

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
