"""Loggers of Lightning 1.x by their names: they are those of the trainer."""

from ..logging.loggers import CSVLogger, TensorBoardLogger
from ..logging.remote_loggers import MLflowLogger as MLFlowLogger
from ..logging.remote_loggers import WandbLogger

__all__ = ["CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


def __getattr__(name: str) -> object:
    if name == "NeptuneLogger":
        closed = "its service closed on March 5, 2026; use one of"
        raise ImportError(f"{name}: {closed} {', '.join(__all__)}", name=name)
    raise AttributeError(name)
