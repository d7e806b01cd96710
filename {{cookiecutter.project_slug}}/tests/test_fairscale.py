"""FairScale trains the digits; conformance/fairscale_rows.py says what else is compared."""

import pytest

from .project import PACKAGE, check_digits

FOLDER = f"{PACKAGE}_trainer.strategies.fairscale.sharded"
pytest.importorskip(FOLDER, reason="its folder was deleted")


@pytest.mark.slow
@pytest.mark.needs("fairscale")
def test_it_trains_the_digits_on_two_processes(tmp_path):
    check_digits(tmp_path, "ddp_sharded", "--trainer.devices", "2", engine="fairscale")
