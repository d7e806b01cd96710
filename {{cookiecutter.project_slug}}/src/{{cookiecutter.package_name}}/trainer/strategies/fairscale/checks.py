"""What FairScale would compute wrongly, or say in its own terms."""

from collections.abc import Mapping

from ...errors import ConfigurationError, UserError
from ..optimizers import Optimization


def check_owned(optimization: Optimization, names: Mapping[int, str]) -> None:
    """Check that optimizers step parameters of the module alone.

    Args:
        optimization: the user's.
        names: of the module's parameters, by ``id``.

    Raises:
        ConfigurationError: they do not.
    """
    if {id(each) for each in optimization.parameters} - names.keys():
        raise ConfigurationError(
            "configure_optimizers: an optimizer has a parameter that is not the module's own; "
            "make it an attribute of the module"
        )


def not_averaged(name: str) -> UserError:
    """What to raise for a parameter that the last micro-batch of a step has not used."""
    return UserError(
        f"{name} was used in a micro-batch of this step but not in its last, in which FairScale "
        "averages gradients; use accumulate_grad_batches=1, or strategy='ddp'"
    )
