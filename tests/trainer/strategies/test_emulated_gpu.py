"""What fits do on a GPU, on the emulated one: devices, numbers, and what the host waits for."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.project import succeed

from emulated_models import FIRST, LAST
from emulated_subject import FITS, STEPS

# torch's gradient scaler asks, of each optimizer, whether it is to step; a fused one it need not.
_SCALER = "item at strategies/precision.py < torch/amp/grad_scaler.py"
_WAITS = {"16-mixed": {_SCALER: LAST - FIRST + 1}, "16-mixed manual": {_SCALER: LAST - FIRST + 1}}
_KERNELS = {
    "automatic": {"_foreach_addcdiv_.ScalarList"},
    "sgd": {"_foreach_mul_.Scalar"},
    "fused": {"_fused_adamw_.default"},
    "clipping": {"_foreach_norm.Scalar"},
    "clipping values": {"_foreach_clamp_max_.Scalar"},
    "16-mixed": {
        "_amp_foreach_non_finite_check_and_unscale_.default",
        "_amp_update_scale_.default",
    },
    "16-mixed fused": {"_fused_adamw_.default", "_amp_update_scale_.default"},
    "activations computed again": {"_foreach_addcdiv_.ScalarList"},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that was seen, in a process of its own: the device stays registered."""
    done = succeed(["-m", "emulated_subject", tmp_path_factory.mktemp("emulated")])
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def section(seen: Any, *names: str) -> Any:
    for name in names:
        seen = seen[name]
        assert "failed" not in seen, seen["failed"]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_a_step_and_a_validation_wait_for_nothing(seen: Any, name: str) -> None:
    fit = section(seen, "fits", name)
    assert fit["steps"] == STEPS
    waits = {re.sub(r":\d+", "", place): count for place, count in fit["waits"].items()}
    assert waits == _WAITS.get(name, {})
    assert fit["pageable"] == {}
    assert fit["validated"] > 0
    assert (fit["waits in validation"], fit["pageable in validation"]) == ({}, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_a_fit_comes_to_what_it_does_on_the_cpu(seen: Any, name: str) -> None:
    fit = section(seen, "fits", name)
    assert fit["devices"] == ["emulated:0"]
    # The same kernels, but for those that take all parameters at once.
    assert fit["difference"] < 1e-5
    assert fit["metrics"] == pytest.approx(fit["metrics on the CPU"], rel=1e-4)
    assert fit["metrics"]["least_epoch"] == 0.0
    assert fit["metrics"]["seen_epoch"] == 4.0 * fit["batches"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FITS)
def test_a_resumed_fit_equals_the_whole_one(seen: Any, name: str) -> None:
    fit = section(seen, "fits", name)
    assert fit["resumed equal"]
    assert fit["metrics resumed"] == fit["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("name", _KERNELS)
def test_the_kernels_are_those_of_a_gpu(seen: Any, name: str) -> None:
    assert set(section(seen, "fits", name)["operators"]) >= _KERNELS[name]


@pytest.mark.slow
def test_evaluation_equals_the_cpus(seen: Any) -> None:
    for name in ("validate", "test"):
        ours, theirs = section(seen, "evaluations", name)
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert len(ours) == 1


@pytest.mark.slow
def test_a_fit_resumes_on_the_other_device(seen: Any) -> None:
    differences = section(seen, "crossings")
    assert len(differences) == 4
    assert max(differences.values()) < 1e-5


@pytest.mark.slow
def test_predictions_are_on_the_host_in_whatever_they_are(seen: Any) -> None:
    assert section(seen, "evaluations")["types"] == ["Tensor"]
    assert section(seen, "evaluations")["equal"]


@pytest.mark.slow
def test_a_search_for_the_batch_size_steps_in_16_mixed(seen: Any) -> None:
    assert section(seen, "batch sizes") == {"automatic": 4 * STEPS, "manual": 4 * STEPS}


def planted_at(name: str) -> str:
    source = (Path(__file__).parents[1] / "emulated_subject.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(source, 1) if text.endswith(f"planted: {name}"))
    return f"emulated_subject.py:{line}"


@pytest.mark.slow
def test_an_item_in_a_step_is_noticed(seen: Any) -> None:
    waits = section(seen, "planted", "item")["waits"]
    assert waits == {f"item at {planted_at('item')}": LAST - FIRST + 1}


@pytest.mark.slow
def test_a_pageable_copy_in_a_step_is_noticed(seen: Any) -> None:
    counts = section(seen, "planted")["pageable"]
    assert counts["pageable"] == {f"to the device at {planted_at('pageable')}": LAST - FIRST + 1}
    assert counts["waits"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["left on the CPU", "unmoved"])
def test_a_tensor_left_on_the_cpu_is_an_error(seen: Any, name: str) -> None:
    expected = "Expected all tensors to be on the same device, but found cpu and emulated:0"
    assert section(seen, "planted", name).startswith(expected)


@pytest.mark.slow
def test_what_waits_and_what_reads_pageable_memory(seen: Any) -> None:
    expected = {
        (1, 0): [
            *("item", "float", "bool", "tolist", "cpu", "nonzero", "mask", "masked_select"),
            *("equal", "copy_ to host", "synchronize"),
        ],
        (1, 1): ["number", "to device", "copy_ to device", "rows by the host"],
        (0, 1): ["to device, non_blocking"],
        (0, 0): ["to device, pinned", "fill", "arithmetic", "rows"],
    }
    assert section(seen, "detected") == {
        name: list(counts) for counts, names in expected.items() for name in names
    }


@pytest.mark.slow
def test_a_tensor_of_another_stream_is_waited_for_and_noted(seen: Any) -> None:
    assert section(seen, "streams") == {
        "False True": "a tensor is used on a stream that has not waited for it",
        "True False": "a tensor is used on another stream without record_stream",
        "True True": "[2.0, 2.0, 2.0, 2.0]",
    }


@pytest.mark.slow
def test_tensors_on_several_devices_are_an_error(seen: Any) -> None:
    several = "Expected all tensors to be on the same device, but found"
    mixed = f"{several} cpu and emulated:0"
    assert section(seen, "mixtures") == {
        "cpu": f"{mixed} in aten.add.Tensor",
        "in place": f"{mixed} in aten.mul_.Tensor",
        "cat": f"{mixed} in aten.cat.default",
        "foreach": f"{mixed} in aten._foreach_add.List",
        "another": f"{several} emulated:0 and emulated:1 in aten.add.Tensor",
        "fused": f"{mixed} in aten._fused_sgd_.default",
    }
