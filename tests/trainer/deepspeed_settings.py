"""Refusals of DeepSpeed's configuration."""

import json
from pathlib import Path
from typing import Any

import my_project_trainer as trainer
from my_project_trainer.errors import ConfigurationError


def problems(strategy: str = "deepspeed", **options: Any) -> list[str]:
    """What a trainer says to options of a strategy; its own ones are under ``trainer``."""
    given = {"accelerator": "cpu", "devices": 2, "strategy": strategy, **options.pop("trainer", {})}
    try:
        trainer.Trainer(**given, strategy_options=options)
    except ConfigurationError as error:
        return [problem for problem in error.problems if "needs the package" not in problem]
    return []


def written(path: Path, content: Any) -> str:
    """The path of a file that holds JSON."""
    path.write_text(json.dumps(content))
    return str(path)
