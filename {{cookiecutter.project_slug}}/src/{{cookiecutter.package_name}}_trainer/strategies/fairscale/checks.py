"""Check what FairScale would compute incorrectly or report unclearly."""

from collections.abc import Mapping

from ...errors import ConfigurationError, UserError
from ..optimizers import Optimization


def check_owned(optimization: Optimization, names: Mapping[int, str]) -> None:
    """Check that optimizers step only parameters of the module.

    Args:
        optimization: The user's optimizers.
        names: Names of the module's parameters, by ``id``.

    Raises:
        ConfigurationError: An optimizer has another parameter.
    """
    if {id(each) for each in optimization.parameters} - names.keys():
        raise ConfigurationError(
            "configure_optimizers: an optimizer has a parameter that is not the module's own; "
            "make it an attribute of the module"
        )


def not_averaged(name: str) -> UserError:
    """The error for a parameter that the last micro-batch of a step did not use."""
    return UserError(
        f"{name} was used in a micro-batch of this step but not in its last, in which FairScale "
        "averages gradients; use accumulate_grad_batches=1, or strategy='ddp'"
    )
