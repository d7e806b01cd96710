"""Reads configurations, and classes that refuse or take anything."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from my_project_trainer import DataModule, TrainingModule
from my_project_trainer.cli import configuration
from my_project_trainer.errors import ConfigurationError
from tests.project import PACKAGE, ROOT

TASKS = f"{PACKAGE}.tasks"
DIGITS = ["--config", str(ROOT / "configs" / "digits.yaml")]
GPT = ["--config", str(ROOT / "configs" / "gpt.yaml")]
CPU = ["--trainer.accelerator", "cpu"]


class NeedsArgument(TrainingModule):
    def __init__(self, width: int, depth: int = 1) -> None:
        super().__init__()
        self.width, self.depth = width, depth

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("nothing is trained here")

    def configure_optimizers(self) -> Any:
        raise AssertionError("nothing is trained here")


class TakesAnything(DataModule):
    def __init__(self, size: int = 1, **options: Any) -> None:
        self.size, self.options = size, options


class HasTags(NeedsArgument):
    def __init__(self, tags: list[str] = ["x"], file: Path | None = None) -> None:  # noqa: B006
        super().__init__(1)
        self.tags, self.file = tags, file


class PassesOn(NeedsArgument):
    def __init__(self, extra: int = 1, **options: Any) -> None:
        super().__init__(**options)


class FailsByItself(TrainingModule):
    def __init__(self) -> None:
        super().__init__()
        raise ConfigurationError("model: this one never works")


def read(*arguments: str | Path, command: str = "fit") -> Any:
    return configuration.read_work("program", command, list(map(str, arguments)))


def resolved(work: Any) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(work.trainer.configuration)
    return content


def mistakes(*arguments: str | Path, command: str = "fit") -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        read(*arguments, command=command)
    lines: list[str] = raised.value.problems
    assert all("\n" not in line for line in lines)
    return lines


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path
