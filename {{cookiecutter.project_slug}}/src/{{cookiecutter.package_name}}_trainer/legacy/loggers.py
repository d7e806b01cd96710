"""Loggers of Lightning 1.x by their names: they are those of the trainer."""

from ..errors import nearest
from ..logging.loggers import CSVLogger, TensorBoardLogger
from ..logging.remote_loggers import MLflowLogger as MLFlowLogger
from ..logging.remote_loggers import WandbLogger

__all__ = ["CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(name)
    about = f"there is no logger {name}{nearest(name, __all__)}"
    if name == "NeptuneLogger":
        about = f"{name}: its service closed on March 5, 2026; use one of {', '.join(__all__)}"
    raise ImportError(about, name=name)
