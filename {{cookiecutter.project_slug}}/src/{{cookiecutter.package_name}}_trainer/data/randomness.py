"""Seed, save and restore all random number generators that a training step may use."""

import contextlib
import hashlib
import os
import random
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigurationError
from ..options.reading import SEEDED

State = dict[str, Tensor]
OWN_SEEDS = {0}  # that were set here, and the default
_ROUNDS = 6  # of the network of a permutation
_SPLIT_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # mixes bits (Steele et al. 2014)


def mix(*parts: int) -> int:
    """Combine integers to a 63-bit seed; a change of any of them gives another seed."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def permuted(positions: Iterable[int], count: int, key: int) -> list[int]:
    """The numbers at these positions of the random permutation of ``range(count)`` of a key.

    Computed where it is read, and never held, in about 0.2 µs for each position: a Feistel network
    permutes the numbers of enough bits; a result that is not below ``count`` is permuted again
    (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
    """
    numbers = _in_bits(np.fromiter(positions, dtype=np.uint64), count, key)
    while (outside := numbers >= count).any():
        numbers[outside] = _in_bits(numbers[outside], count, key)
    return cast(list[int], numbers.tolist())


def _in_bits(numbers: NDArray[np.uint64], count: int, key: int) -> NDArray[np.uint64]:
    bits = max(2, (count - 1).bit_length())
    low, high = bits // 2, bits - bits // 2
    for number in range(_ROUNDS):
        right = numbers & np.uint64((1 << low) - 1)
        mixed = right ^ np.uint64(mix(key, number))
        for shift, factor in _SPLIT_MIX:
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        left = (numbers >> np.uint64(low)) ^ mixed ^ (mixed >> np.uint64(31))
        numbers = (right << np.uint64(high)) | (left & np.uint64((1 << high) - 1))
        low, high = high, low
    return numbers


def seed_everything(seed: int, workers: Literal[True] = True) -> None:
    """Seed torch (all devices), NumPy, Python, and trainers without a seed; workers always are."""
    if not workers:
        raise ConfigurationError("seed_everything: workers=False: leave it out, they are seeded")
    SEEDED["seed"] = int(seed)
    seed_generators(seed)


def seed_generators(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python."""
    if seed < 2**32:  # those that are mixed are larger, and one for each step
        OWN_SEEDS.add(seed)
    torch.manual_seed(seed)
    seed_sample(seed)


def seed_sample(seed: int) -> None:
    """Seed the generators that an augmentation may use: torch's CPU generator, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def deterministic_algorithms(is_wanted: bool) -> Iterator[None]:
    """Use deterministic kernels in this context, if wanted; operations without one raise errors."""
    if not is_wanted:  # calling torch's function imports its compiler, which takes two seconds
        yield
        return
    # Before the first use of cuBLAS: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)


class Snapshot:
    """States of the host's generators in their own formats: ten times faster than tensors."""

    def __init__(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]

    @classmethod
    def of(cls, state: State) -> "Snapshot":
        self = cls()
        self._torch, gauss = state["torch"], state["python_gauss"].tolist()
        version, *words = state["python"].tolist()
        self._python = (version, tuple(words), gauss[0] if gauss else None)
        keys, position = state["numpy"].numpy().astype(np.uint32), state["numpy_position"].tolist()
        self._numpy = ("MT19937", keys, *position, state["numpy_gauss"].item())
        return self

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def state(self) -> State:
        """The same as tensors."""
        version, words, gauss = self._python
        _, keys, position, has_gauss, numpy_gauss = self._numpy
        return {
            "torch": self._torch,
            "python": torch.tensor([version, *words], dtype=torch.int64),
            "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
            "numpy": torch.from_numpy(keys.astype(np.int64)),
            "numpy_position": torch.tensor([position, has_gauss]),
            "numpy_gauss": torch.tensor([numpy_gauss], dtype=torch.float64),
        }


def full_state(devices: Sequence[torch.device]) -> State:
    """States of the generators of the host, and of this process' devices."""
    state = Snapshot().state()
    for name, accelerator in _accelerators(devices).items():
        state[name] = torch.get_device_module(accelerator).get_rng_state(accelerator)
    return state


def set_full_state(state: State, devices: Sequence[torch.device]) -> None:
    """Restore a state of :func:`full_state`; a device's state only on the same type of device."""
    Snapshot.of(state).restore()
    for name, accelerator in _accelerators(devices).items():
        if name in state:
            torch.get_device_module(accelerator).set_rng_state(state[name], accelerator)


def _accelerators(devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Devices by name of their state; those after the first are replicas in the same process."""
    used = [device for device in dict.fromkeys(devices) if device.type != "cpu"]
    return {f"{d.type}-{i}" if i else d.type: d for i, d in enumerate(used)}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the host's generators at the end of this context."""
    outside = Snapshot()
    try:
        yield
    finally:
        outside.restore()


class Stream:
    """A separate random stream: inside ``with stream:`` the host's generators are this stream's.

    What a loader draws inside does not affect the model's randomness, such as dropout.
    """

    def __init__(self, seed: int) -> None:
        with kept():
            seed_sample(seed)
            self.position = Snapshot()

    def __enter__(self) -> None:
        self._outside = Snapshot()
        self.position.restore()

    def __exit__(self, *error: object) -> None:
        self.position = Snapshot()
        self._outside.restore()
