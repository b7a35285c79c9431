"""Rounds updated weights to bf16 at random: up with the probability that is the dropped part of a unit in the last place.

An update smaller than half such a unit is lost by rounding to nearest, step after step; rounded at random it arrives on average,
so no fp32 master is needed. What is added are 16 random bits below the ones that stay, as torchao and torchtune do it.
Source: Gupta et al., Deep Learning with Limited Numerical Precision (arXiv 1502.02551); Zamirai et al., Revisiting BFloat16
Training (arXiv 2010.06192).

The bits of a piece of ``ROUNDING_PIECE_ELEMENTS`` come from a generator that is seeded by the workload's seed, the tensor's name,
the number of its updates and the piece. So a run that is resumed rounds as one that was not, wherever the state is; on CUDA the
device's generator draws others than the host's.
"""

import hashlib

import torch

from optimizer.plan.weights import ROUNDING_PIECE_ELEMENTS

NUM_ROUNDINGS = "num_roundings"
"""Key of a tensor's count of updates in a checkpoint."""
_HALF_UNIT = 1 << 15
_KEPT_BITS = -(1 << 16)
_LOWEST = -(1 << 63)


class StochasticRounding:
    """The roundings of a run on one device, and how often each tensor was rounded."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = torch.Generator(device)
        self.num_roundings: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Before the roundings of a tensor's next update."""
        self.num_roundings[name] = self.num_roundings.get(name, 0) + 1

    @torch.no_grad()
    def round_(self, wide: torch.Tensor, *, name: str, start: int = 0, noise: torch.Tensor | None = None) -> None:
        """Leave only numbers that bf16 has, in place; a number that is one stays.

        wide: flat fp32, from element ``start`` of the tensor on, which is a multiple of ROUNDING_PIECE_ELEMENTS. noise: int64 for
        a quarter of a piece's elements, rounded up; made here unless given.
        """
        if noise is None:
            noise = torch.empty(num_noise_words(wide.numel()), dtype=torch.int64, device=wide.device)
        for index, piece in enumerate(torch.split(wide, ROUNDING_PIECE_ELEMENTS)):
            self._generator.manual_seed(self._seed_of(name, start // ROUNDING_PIECE_ELEMENTS + index))
            words = noise[: num_noise_words(piece.numel())]
            words.random_(_LOWEST, None, generator=self._generator)
            bits = piece.view(torch.int32)
            # From -2**15 on, so half a unit more makes them what is to be added to the bits that go.
            bits.add_(words.view(torch.int16)[: piece.numel()]).add_(_HALF_UNIT).bitwise_and_(_KEPT_BITS)

    def _seed_of(self, name: str, piece: int) -> int:
        text = f"{self._seed} {name} {self.num_roundings[name]} {piece}"
        # 32 bits, which is all that the host's generator makes of a seed.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def num_noise_words(num_elements: int) -> int:
    """Words of 64 random bits for so many elements, a piece at a time."""
    return -(-min(num_elements, ROUNDING_PIECE_ELEMENTS) // 4)
