"""Random numbers of the emulated GPU, with the state that CUDA's have."""

import torch
from torch import Tensor


class Philox:
    """A generator with CUDA's state: a seed, and an offset that DTensors move."""

    def __init__(self) -> None:
        self._seed, self._offset = 0, 0

    def manual_seed(self, seed: int) -> None:
        self._seed, self._offset = seed, 0

    def get_state(self) -> Tensor:
        return torch.tensor([self._seed, self._offset]).view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self._seed, self._offset = state.view(torch.int64).tolist()

    def begin(self) -> Tensor:
        """The state of a CPU's generator, which draws the numbers here."""
        seed = (self._seed * 1_000_003 + self._offset) % 2**63
        return torch.Generator().manual_seed(seed).get_state()

    def end(self, count: int) -> None:
        """So many numbers have been drawn."""
        self._offset += (count + 3) // 4 * 4
