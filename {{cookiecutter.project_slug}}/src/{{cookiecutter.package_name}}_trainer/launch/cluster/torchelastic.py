"""torchelastic: torchrun, and other programs that use its agent."""

from . import environment
from .layout import Environment, Layout, Source


def _read(env: Environment) -> Layout | None:
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    return environment.read_ranks(env, "torchelastic")


SOURCE = Source("torchelastic", 10, _read, environment.SOURCE.numbers)
