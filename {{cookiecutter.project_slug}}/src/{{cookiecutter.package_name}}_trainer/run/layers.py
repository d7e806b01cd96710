"""Checks of what options change in the layers of a module; imported if one of them is given."""

from ..errors import Problems
from ..loop import compilation
from ..memory import activation_checkpointing
from ..module import TrainingModule
from ..options import Options
from ..strategies import Strategy


def check(options: Options, strategy: Strategy, problems: Problems) -> None:
    """Check their values, and whether torch can compile here."""
    compilation.check(options.compile, problems)
    with problems:
        activation_checkpointing.check_names(options.activation_checkpointing)
    if "compile" not in strategy.limits.refused:
        with problems:
            compilation.check_compiler(options.compile)


def check_module(options: Options, module: TrainingModule) -> None:
    """Raise a ConfigurationError if they name what is not in a module."""
    activation_checkpointing.select(module, options.activation_checkpointing)
    compilation.select(module, options.compile, options.activation_checkpointing)
