"""Horovod trains the digits; conformance/horovod_rows.py says what else is compared."""

import pytest

from .conformance.horovod_rows import horovodrun
from .project import PACKAGE, check_digits

FOLDER = f"{PACKAGE}_trainer.strategies.horovod.horovod"
pytest.importorskip(FOLDER, reason="its folder was deleted")


@pytest.mark.slow
@pytest.mark.needs("horovod")
def test_it_trains_the_digits_on_two_processes(tmp_path):
    check_digits(tmp_path, "horovod", by=horovodrun(2))
