"""What a command needs from a module: the hooks it overrides, and iterables of batches."""

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import ConfigurationError, UserError, refuse, shown
from ..module import DataHooks, DataModule, Loader, TrainingModule
from ..module.hooks import is_overridden, problems_of_names, problems_of_signatures

Data = DataModule | Loader | Mapping[str, Loader] | None
LoadersByName = Mapping[str, Loader]  # of an evaluation; a single one has the name ``""``
_Evaluation = Literal["val", "test", "predict"]
_MOST_WORKERS = 64  # for each core: workers that wait for a network may be many more than cores
_STEPS = {"val": "validation_step", "test": "test_step", "predict": "predict_step"}
_GIVEN = "the trainer was given"
_RETURNS = {
    "training_step": "the loss of a batch",
    "validation_step": "None, and logs the metrics of a batch",
    "test_step": "None, and logs the metrics of a batch",
    "predict_step": "predictions for a batch, or forward, which it calls by default",
    "configure_optimizers": "the optimizers",
}


def missing(module: object, names: Sequence[str]) -> list[str]:
    """One line for each hook that a module does not override."""
    kind = type(module).__name__
    if not isinstance(module, TrainingModule):
        if isinstance(module, type):
            kind, how = module.__name__, "a class: create it"
        elif kind == "OptimizedModule":
            how = "what torch.compile made: give the module itself, and compile=True"
        else:
            how = "no TrainingModule: derive its class from it, or make it an attribute of one"
        raise ConfigurationError(f"{_GIVEN} {kind}, {how}")
    return [
        f"{kind} has no {name}: override it; it returns {_RETURNS[name]}"
        for name in names
        if not is_overridden(module, TrainingModule, name)
        and not (name == "predict_step" and is_overridden(module, nn.Module, "forward"))
    ]


def check(module: TrainingModule, *names: str) -> None:
    """Raise ConfigurationError if a module does not override a hook, or one cannot be called."""
    refuse(missing(module, names) + problems_of_signatures(module, DataHooks))


def training_loader(data: Data, module: TrainingModule) -> Loader:
    """Get the training loader: the given one, or that of the data module or the module."""
    made, source = _made(data, module, "train")
    _check_loader(made, source)
    _check_repeats(made, source)
    return cast(Loader, made)


def evaluation_loaders(data: Data, module: TrainingModule, stage: _Evaluation) -> LoadersByName:
    """Get the loaders of an evaluation: the given ones, or those of data module or module."""
    return _named(*_made(data, module, stage), module, stage)


def validation_loaders(data: Data, module: TrainingModule, val_data: Data) -> LoadersByName:
    """Get the validation loaders of a fit, if any; they require a ``validation_step``."""
    source = _GIVEN
    if val_data is None:
        val_data, source = _called(data if isinstance(data, DataModule) else module, "val")
    if val_data is None or val_data == []:
        return {}
    check(module, "validation_step")
    _check_repeats(val_data, source)
    return _named(val_data, source, module, "val")


def check_given(data: Data, *, is_training: bool = False) -> None:
    """Check an argument: loaders of batches, or a data module without hooks of other trainers."""
    if isinstance(data, DataModule):
        refuse(problems_of_names(data, DataModule) + problems_of_signatures(data, DataHooks))
    elif data is not None and is_training:
        _check_loader(data, _GIVEN)
        _check_repeats(data, _GIVEN)
    elif data is not None:
        _by_name(data, _GIVEN)


def _named(made: object, source: str, module: TrainingModule, stage: _Evaluation) -> LoadersByName:
    step = getattr(module, _STEPS[stage])
    if isinstance(made, Mapping) and "dataloader_idx" in inspect.signature(step).parameters:
        line = "takes dataloader_idx, which a dict of loaders has not: use self.dataloader_name"
        refuse([f"{type(module).__name__}.{_STEPS[stage]} {line}"])
    return _by_name(made, source)


def _made(data: Data, module: TrainingModule, stage: str) -> tuple[object, str]:
    """The loaders of a stage, and where they come from."""
    if data is not None and not isinstance(data, DataModule):
        return data, _GIVEN
    made, where = _called(data or module, stage)
    if made is None or made == []:
        raise UserError(f"no batches: {where} {made}, and no loader was given: return a DataLoader")
    return made, where


def _called(owner: DataModule | TrainingModule, stage: str) -> tuple[Any, str]:
    name = f"{stage}_dataloader"
    return getattr(owner, name)(), f"{type(owner).__name__}.{name} returned"


def _by_name(loader: Any, source: str) -> dict[str, Any]:
    """Check the loaders of an evaluation, and return them by name, ``""`` for a single one."""
    if not isinstance(loader, Mapping) and _is_several(loader):  # by Lightning's names
        loader = {f"dataloader_idx_{index}": item for index, item in enumerate(loader)}
    if not isinstance(loader, Mapping):
        _check_loader(loader, source)
        return {"": loader}
    if not loader:
        raise UserError(f"{source} an empty dict: give one loader, or a dict of them by name")
    for name, item in loader.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise UserError(f"{source} a loader named {shown(name)}: give each a name, a string")
        _check_loader(item, f"{source}, as {name!r},")
    return dict(loader)


def _check_loader(loader: Any, source: str) -> None:
    """Refuse what is not an iterable of batches, or has too many workers."""
    kind = type(loader).__name__
    if isinstance(loader, Dataset) or type(loader).__module__.startswith("datasets."):
        advice = f"return DataLoader({kind}(…), batch_size=…)"
        raise UserError(f"{source} {kind}, a dataset, which yields single samples: {advice}")
    if _is_several(loader):
        advice = "join the datasets with torch.utils.data.ConcatDataset, or give one of them"
        raise UserError(f"{source} a {kind} of loaders: one loader is supported; {advice}")
    if isinstance(loader, Mapping | str | bytes | Tensor) or not hasattr(loader, "__iter__"):
        advice = "return a DataLoader, or another iterable whose every element is a batch"
        raise UserError(f"{source} {kind}, which is not an iterable of batches: {advice}")
    workers, cores = getattr(loader, "num_workers", 0), os.cpu_count() or 1
    if isinstance(workers, int) and workers > _MOST_WORKERS * cores:
        why = f"each is a process, and this machine has {cores} cores"
        advice = f"give at most {_MOST_WORKERS * cores}"
        raise UserError(f"{source} a loader with num_workers={workers}: {why}; {advice}")


def _check_repeats(loader: Any, source: str) -> None:
    """Refuse a loader that cannot be read in each epoch: a generator is empty after the first."""
    for item in loader.values() if isinstance(loader, Mapping) else [loader]:
        # Other classes may begin again in their __iter__.
        is_plain = isinstance(item, Iterator) and not isinstance(type(item).__iter__, FunctionType)
        if is_plain or isinstance(item, _BaseDataLoaderIter):
            raise UserError(
                f"{source} a {type(item).__name__}, which can be read only once, and a fit reads "
                "it in each epoch: return a DataLoader, or an object whose __iter__ begins again"
            )


def _is_several(loader: Any) -> bool:
    several = loader.values() if isinstance(loader, Mapping) else loader
    is_group = isinstance(loader, Mapping | list | tuple)
    return is_group and any(isinstance(item, DataLoader | Dataset) for item in several)
