"""A fixed piece of work that is timed beside each step, and so says how fast the machine is in that moment.

Products, passes over memory that no cache holds, and small ops, as a step has them, but of torch alone: nothing of what is
measured makes it faster or slower. A neighbour on the same processor, a clock that sinks or a second program does.
"""

import functools
import time

import torch

_SIDE = 512
_NUM_PRODUCTS = 4
_NUM_ELEMENTS = 1 << 22
_NUM_PASSES = 2
_NUM_SMALL = 400


@functools.cache
def get_yardstick() -> "Yardstick":
    """The process's one. Its memory is never given back, from which the C library would learn to keep more of a step's."""
    return Yardstick()


class Yardstick:
    """Some ten milliseconds on two cores."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._matrix = torch.randn((_SIDE, _SIDE), generator=generator)
        self._long = torch.randn(_NUM_ELEMENTS, generator=generator)
        self._product = torch.empty_like(self._matrix)
        self._result = torch.empty_like(self._long)
        self._small = torch.ones(8)
        self.measure_ms()

    def measure_ms(self) -> float:
        started_s = time.perf_counter()
        for _ in range(_NUM_PRODUCTS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        for _ in range(_NUM_PASSES):
            torch.mul(self._long, 2.0, out=self._result)
        for _ in range(_NUM_SMALL):
            torch.add(self._small, self._small)
        return (time.perf_counter() - started_s) * 1000
