"""DeepSpeed trains the digits; conformance/deepspeed_rows.py says what else is compared."""

import pytest

from .project import PACKAGE, check_digits

FOLDER = f"{PACKAGE}_trainer.strategies.deepspeed.deepspeed"
pytest.importorskip(FOLDER, reason="its folder was deleted")


@pytest.mark.slow
@pytest.mark.needs("deepspeed")
def test_it_trains_the_digits_on_two_processes(tmp_path):
    check_digits(tmp_path, "deepspeed", "--trainer.devices", "2", engine="deepspeed")
