"""Run a command in one process: connect to the peers, run, disconnect."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .. import launch
from ..errors import EarlyExit, UserError
from ..launch import devices, hangs, reports
from ..launch.signals import Preempted
from ..module import TrainingModule
from .plan import Plan
from .rank import RankRun, RunResult

Command = partial[Any]  # a method of RankRun with the user's arguments


def run(
    plan: Plan, configuration: str | None, command: Command, *, is_started: bool = False
) -> RunResult:
    """Run a command as the rank that this process is.

    Args:
        plan: The run's.
        configuration: The configuration of the command line, as YAML; ``None`` in a script.
        command: The command.
        is_started: Whether this process was started for the command, and returns the weights.

    Raises:
        EarlyExit: User code called ``sys.exit(0)``.
        UserError: The disk is full, or a loader's worker was killed.
    """
    rank = RankRun(plan, configuration, is_started=is_started)

    def work() -> RunResult:
        rank.connect()
        try:
            return rank.result(command(rank))
        except Preempted:
            raise
        except (OSError, RuntimeError) as error:
            if (line := reports.failure_of_machine(error, plan.request.root)) is None:
                raise
            raise UserError(line) from None
        except SystemExit as error:
            if error.code:
                raise  # the exit code shows the failure
            place = hangs.of_error(error).rpartition("\n")[2].strip()
            raise EarlyExit(
                f"user code called sys.exit({error.code}) in step {rank.global_step + 1}, before "
                f"{command.func.__name__} ended ({place}): return instead, or raise an error"
            ) from error

    strategy = plan.strategy
    with devices.backends_set(plan.device.type, plan.options):
        return launch.run_external(
            work, strategy.teardown, strategy.waits_for_peers, strategy.lost_peer_errors
        )


def run_started(
    plan: Plan, configuration: str | None, command: Command, module: TrainingModule
) -> RunResult:
    """Run a command in a process that was started for it; the result includes the weights."""
    result = run(plan.placed(), configuration, command, is_started=True)
    weights = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in module.state_dict().items()
    }
    return replace(result, weights=weights)
