"""BatchNorm on parts of a batch equals BatchNorm on the whole."""

import my_project_trainer as trainer
import pytest
import torch
from my_project_trainer.launch import collectives
from my_project_trainer.strategies import sync_batchnorm
from safetensors.torch import load_file
from tests.conformance.rows import rounding
from torch import nn

from group_worker import CASES, STEPS, Case, run_ranks


@pytest.fixture(scope="module", params=[2, 3])
def trained(request, tmp_path_factory):
    """The number of processes, and the folder into which their ranks wrote."""
    folder = tmp_path_factory.mktemp("sync-batchnorm")
    run_ranks("train_cases", request.param, folder)
    return request.param, folder


@pytest.mark.parametrize("name", CASES)
def test_parts_equal_the_whole(trained, name):
    processes, folder = trained
    case = CASES[name][processes]
    # A mean of 1e6 leaves ten of sixteen digits for what varies round it.
    exact = {torch.float32: rounding(100, 1.0), torch.float64: 1e-12}[case.dtype]
    bound = exact * max(1, case.offset / 1e2)
    assert_equals_whole(folder, name, processes, case.train(case.make(), slice(None)), bound)


def assert_equals_whole(folder, name, processes, reference, bound):
    """What ranks have written is what a BatchNorm gives for the whole batch."""
    ranks = [load_file(folder / f"{name}.{rank}") for rank in range(processes)]
    assert reference.keys() == ranks[0].keys()
    for key, expected in reference.items():
        tensors = [rank[key] for rank in ranks]
        if key.startswith("buffer."):
            assert all(tensor.equal(tensors[0]) for tensor in tensors)
            result = tensors[0]
        else:
            result = sum(tensors) if key.startswith("gradient.") else torch.cat(tensors)
        torch.testing.assert_close(result, expected, rtol=bound, atol=bound, msg=f"{key}: {name}")


@pytest.mark.parametrize("name", CASES)
def test_alone_it_is_plain_batchnorm_to_the_last_bit(name):
    case = CASES[name][2]
    plain = case.train(case.make(), slice(None))
    alone = case.train(sync_batchnorm.convert(case.make(), "cpu"), slice(None))
    assert plain.keys() == alone.keys()
    assert all(alone[key].equal(value) for key, value in plain.items())
    assert len([key for key in plain if key.startswith("output")]) == STEPS


class Shared(nn.Module):
    """Holds a BatchNorm twice, one more in a plain list, and calls a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2)
        self.nested = nn.ModuleDict({"same": self.first, "other": nn.BatchNorm2d(2, eps=0.5)})
        self.in_a_list = [self.first]
        self.group = nn.GroupNorm(1, 2)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_parameters_buffers_and_settings_stay(accelerator):
    module = Shared().eval()
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {key: value.clone() + 1 for key, value in module.state_dict().items()}
    converted = sync_batchnorm.convert(module, accelerator)
    assert converted is module
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(after[name] is value for name, value in before.items())
    assert (module.nested["other"].eps, module.first.training) == (0.5, False)
    assert type(module.group) is nn.GroupNorm
    converted.load_state_dict(state)
    Shared().load_state_dict(converted.state_dict())


@pytest.mark.parametrize(
    ("accelerator", "kind"), [("cpu", sync_batchnorm.SyncBatchNorm), ("cuda", nn.SyncBatchNorm)]
)
def test_whoever_holds_a_batchnorm_holds_the_converted_one(accelerator, kind):
    module = Shared()
    called = []
    module.first.register_forward_hook(lambda *_: called.append(1))
    sync_batchnorm.convert(module, accelerator)
    assert module.nested["same"] is module.first
    for layer in (module.first, module.nested["other"], module.in_a_list[0]):
        assert isinstance(layer, kind)
    module.first(torch.ones(2, 2))
    assert called == [1]


def test_a_module_that_is_itself_a_batchnorm_is_converted():
    for accelerator, kind in (("cpu", sync_batchnorm.SyncBatchNorm), ("cuda", nn.SyncBatchNorm)):
        assert isinstance(sync_batchnorm.convert(nn.BatchNorm2d(2), accelerator), kind)


def test_half_precision_comes_out_as_it_went_in(monkeypatch):
    module = sync_batchnorm.convert(Case((4,)).make().float(), "cpu")
    plain = Case((4,)).make().float()
    # Two ranks that have the same part.
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "all_reduce", lambda tensor: tensor * 2)
    inputs = torch.randn(8, 3, dtype=torch.bfloat16)
    output = module(inputs)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, plain(torch.cat([inputs, inputs]))[:8], rtol=1e-2, atol=1e-2)


def test_a_single_value_a_channel_cannot_be_trained_on(monkeypatch):
    monkeypatch.setattr(collectives, "world_size", lambda: 2)
    monkeypatch.setattr(collectives, "all_reduce", lambda tensor: tensor)
    module = sync_batchnorm.convert(nn.BatchNorm1d(3), "cpu")
    with pytest.raises(ValueError, match="needs at least 2 values per channel in training, not 1"):
        module(torch.ones(1, 3))
    with pytest.raises(ValueError, match="takes 2 dimensions or more, not 1"):
        module(torch.ones(3))


def test_a_repeated_batch_may_not_count_in_the_statistics():
    with pytest.raises(trainer.ConfigurationError) as raised:
        trainer.Trainer(accelerator="cpu", max_steps=1, sync_batchnorm=True, uneven_inputs="join")
    assert raised.value.problems == [
        "uneven_inputs='join' with sync_batchnorm=True: a rank whose loader has ended repeats a "
        "batch, which would count in the statistics; give each rank as many batches"
    ]
