"""Notes of a convolution, of which ``estimate/cpu/convolution_scratch.py`` says what the CPU's kernels hold.
Torch-free."""

from typing import NamedTuple


class Convolution(NamedTuple):
    """Sizes of the input ("in") and of the result ("out"); the first grows with the micro-batch, the others need not."""

    batch: int
    in_channels: int
    out_channels: int
    in_pixels: int
    out_pixels: int
    taps: int
    """Elements of the kernel, for one channel in and one out."""
    groups: int
    element_bytes: int
    gathered_bytes: int
    """Copies of the input and, in backward, the gradient in one piece where they are not, for as long as the op runs."""
    kernel_is_large: int
    """1 where the kernel is above three elements along both of its last two sides."""
    is_pointwise: int
    """One tap."""
    is_strided: int
    is_dilated: int
    is_transposed: int
    gives_input_gradient: int
    """1 where a backward gives the input's gradient; 0 in forward, as the next."""
    gives_weight_gradient: int
    has_bias: int

    @property
    def is_backward(self) -> bool:
        return bool(self.gives_input_gradient or self.gives_weight_gradient)
