"""A file operation of a run fails as on a bad disk, or what a file system does not know is refused.

disk_faults.c makes it fail in the C library, below Python, safetensors and torch.
"""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.project import succeed

HERE = Path(__file__).parents[1]
KILLED = 0
ERRORS = (errno.EIO, KILLED, errno.ENOSPC, errno.ESTALE, errno.EDQUOT)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(14_400),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="disk_faults.c needs gcc"),
]
Faults = list[tuple[int, str, int, int]]
Fit = Callable[[bool, Faults], list[dict[str, Any]]]


@pytest.fixture
def fits(tmp_path: Path) -> Fit:
    """Fits under faults: what disk_subject.py prints of each."""
    library = tmp_path / "disk_faults.so"
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run(["gcc", *flags, str(HERE / "disk_faults.c"), "-ldl"], check=True)

    def started(asynchronous: bool, faults: Faults) -> list[dict[str, Any]]:
        words = [HERE / "disk_subject.py", tmp_path / "runs", str(asynchronous), json.dumps(faults)]
        done = succeed(
            words, extra={"LD_PRELOAD": str(library)}, cwd=tmp_path, timeout=14_400, fresh=True
        )
        new, begun, *lines = map(json.loads, done.stdout.splitlines())
        assert new["files"] == begun["files"]
        assert min(new["operations"], begun["operations"]) > 250
        return lines

    return started


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.exhaustive), 23])
def test_each_operation_that_fails_is_one_line_or_none_and_a_resume_is_exact(
    fits: Fit, every: int, asynchronous: bool
) -> None:
    numbers = [(number, begun) for begun in (0, 2) for number in range(1, 500, every)]
    cases = [(number, "", error, begun) for number, begun in numbers for error in ERRORS]
    if every > 1:  # the errors take turns
        n = len(ERRORS)
        cases = [case for index, case in enumerate(cases) if index % n == index // n % n]
    lines = fits(asynchronous, cases)
    assert len(lines) > len(cases) // 2
    for line in lines:
        said = [text for text in line["said"].splitlines() if not text.startswith("note: ")]
        assert "Traceback" not in line["said"] + line["told"], line
        if line["fault"][2] == KILLED:
            assert line["code"] in (-9, 0), line  # a process that ends later is not killed
        elif line["code"]:
            # safetensors and torch say only that a file of a checkpoint could not be read.
            codes = (2, 75) if "safetensors" in line["failed"] else (75,)
            assert line["code"] in codes, line
            assert len(said) == 1, line
            assert said[0].startswith("error: "), line
        else:
            assert [text for text in said if not text.startswith("warning: ")] == [], line
        # A log that cannot be written is left out, with a warning.
        is_left_out = "logger 'csv' is not used any more" in line["said"] + line["told"]
        assert line["differs"] in [[], ["metrics.csv"] * is_left_out], line
        assert (line["again"], line["hidden"]) == (0, []), line


LINKS = "links cannot be made here ({}): files with their paths are written"
SYNCS = "folders cannot be synced here ({}): a power cut may lose the newest checkpoint"
# What fails each time, how, and the only line that a run prints of it.
CONVENIENCES = [
    *(("symlink", code, LINKS) for code in (errno.EPERM, errno.EOPNOTSUPP)),
    *(("link", code, "") for code in (errno.EPERM, errno.EMLINK)),
    ("chmod", errno.EPERM, ""),
    *(
        ("syncdir", code, SYNCS)
        for code in (errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EIO, errno.ESTALE)
    ),
    *(("rmdir", code, "") for code in (errno.ENOTEMPTY, errno.EBUSY)),  # NFS keeps a file
]


def test_what_a_file_system_does_not_know_is_a_note(fits: Fit) -> None:
    lines = fits(False, [(0, f" {kind} ", code, 0) for kind, code, _ in CONVENIENCES])
    for line, (kind, code, note) in zip(lines, CONVENIENCES, strict=True):
        assert (line["code"], line["again"], line["differs"], line["hidden"]) == (0, 0, [], [])
        assert line["failed"] or kind == "chmod", line  # a run changes no modes
        assert line["said"].splitlines() == [f"note: {note.format(os.strerror(code))}"] * bool(note)
