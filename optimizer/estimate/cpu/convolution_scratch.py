"""Memory that a convolution holds on the CPU beside its arguments and results, while it runs. Torch-free.

In fp32 torch has oneDNN do most of them (Convolution.cpp, ``use_mkldnn``), which wants its arguments in blocks of channels: the
input, the weight and, in backward, the gradient are there a second time, and so is each result until it is laid out again
(mkldnn/Conv.cpp). Channels are filled up to whole blocks, but for images of few channels. What a stride's backward makes has
its channels innermost, and is there three times. Threads that divide the images have a gradient of the weight each. Where torch
does it by itself (one small image, single pixels on one thread, 16 bits) it copies for each pixel the inputs that it is made
from (``slow_conv2d``), but for single pixels.

Found with torch's profiler and ONEDNN_VERBOSE, on processors with AVX2 (blocks of 8) and AVX-512 (of 16). Whether threads
divide images or channels is oneDNN's weighing; here they divide images, with AVX2 those of single pixels alone. *Not modelled*:
on AVX-512 channels that do not fill a block, and 16 bits by oneDNN; buffers of strided and dilated backwards; 16 bits in groups;
transposed ones of few channels.
"""

from collections.abc import Iterator
from typing import NamedTuple

from optimizer.profile.meta_ops.convolution import Convolution

_BLOCK, _WIDE_BLOCK = 8, 16
_COLOURS = 3
"""Channels that the weight's gradient is made of without blocks."""
_FP32_BYTES = 4
_MANY_IMAGES = 16
"""Number of images from which on even single pixels are oneDNN's on one thread."""
_MANY_ELEMENTS = 20_480
"""Number of elements above which one image alone is oneDNN's."""
_GUARD_BYTES = 128
"""Bytes beside what the library asks for itself."""
_SUMS_GUARD_BYTES, _BIAS_SUMS_BYTES = 8_832, 12_416
"""Most bytes beside the gradients that threads sum up: for the weight's, and for the bias's."""


def hold_convolution(convolution: Convolution, *, num_threads: int, packs_bf16: bool) -> int:
    """Bytes at its highest moment."""
    if not _is_librarys(convolution, num_threads):
        return convolution.gathered_bytes + _columns_bytes(convolution)
    library = _Library(convolution, num_threads, _WIDE_BLOCK if packs_bf16 else _BLOCK)
    if convolution.is_backward:
        return convolution.gathered_bytes + max(library.backward())
    held_bytes = max(library.one_pass(towards_input=bool(convolution.is_transposed)))
    return convolution.gathered_bytes + held_bytes - library.out_bytes


def _is_librarys(convolution: Convolution, num_threads: int) -> bool:
    num_elements = convolution.batch * convolution.in_channels * convolution.in_pixels
    is_large = convolution.groups > 1 or convolution.kernel_is_large or convolution.batch > 1 or num_elements > _MANY_ELEMENTS
    is_more_than_pixels = not convolution.is_pointwise or convolution.is_strided or convolution.is_dilated
    is_shared = num_threads > 1 or is_more_than_pixels or convolution.batch >= _MANY_IMAGES
    return convolution.element_bytes == _FP32_BYTES and bool(is_large and is_shared)


def _columns_bytes(convolution: Convolution) -> int:
    """Bytes of each input of the kernel, for every pixel of the side that is read by patches."""
    is_read = convolution.gives_weight_gradient or not convolution.is_backward
    if not is_read or (convolution.is_pointwise and not convolution.is_strided):
        return 0
    channels, pixels = convolution.in_channels, convolution.out_pixels
    if convolution.is_transposed:
        channels, pixels = convolution.out_channels, convolution.in_pixels
    patch = channels // convolution.groups * convolution.taps
    return convolution.batch * patch * pixels * convolution.element_bytes


class _Library(NamedTuple):
    """A convolution as oneDNN does it."""

    convolution: Convolution
    num_threads: int
    block: int
    """Channels."""

    def backward(self) -> Iterator[int]:
        """First the input's gradient, then, beside it, the weight's; less what is returned."""
        convolution = self.convolution
        bias_bytes = convolution.out_channels * _FP32_BYTES * convolution.has_bias
        weight_bytes = (self.weight_bytes + bias_bytes) * convolution.gives_weight_gradient
        if convolution.gives_input_gradient:
            for held_bytes in self.one_pass(towards_input=not convolution.is_transposed):
                yield held_bytes - self.in_bytes - weight_bytes
        if convolution.gives_weight_gradient:
            is_flat = self.is_flat and convolution.in_channels == _COLOURS
            blocked_bytes = self.blocked_weight_bytes(is_flat=is_flat) + bias_bytes
            read_bytes = self.blocked_in_bytes(is_flat=is_flat) + self.blocked_out_bytes
            sums_bytes = self.sums_bytes(blocked_bytes)
            yield self.with_own(read_bytes + blocked_bytes - weight_bytes) + sums_bytes
            yield blocked_bytes

    def one_pass(self, *, towards_input: bool) -> Iterator[int]:
        """Bytes held from one side to the other, the result included. towards_input: as a backward does, and a
        transposed one forward.
        """
        convolution = self.convolution
        if towards_input:
            is_turned = bool(convolution.is_strided) and not self.is_depthwise
            read_bytes, made_bytes = self.blocked_out_bytes, self.in_bytes
            blocked_bytes = made_bytes
            if convolution.is_transposed:
                read_bytes, made_bytes = self.blocked_in_bytes(), self.out_bytes
                blocked_bytes = made_bytes
            elif not is_turned:
                blocked_bytes = self.blocked_in_bytes()
            yield read_bytes + self.blocked_weight_bytes() + blocked_bytes
            yield made_bytes * 3 if is_turned else blocked_bytes + made_bytes
            return
        if convolution.is_transposed:
            read_bytes, made_bytes, blocked_bytes = self.blocked_out_bytes, self.in_bytes, self.blocked_in_bytes()
        else:
            read_bytes, made_bytes = self.blocked_in_bytes(is_flat=self.is_flat), self.out_bytes
            blocked_bytes = self.blocked_out_bytes
        yield self.with_own(read_bytes + self.blocked_weight_bytes(is_flat=self.is_flat) + blocked_bytes)
        yield blocked_bytes + made_bytes

    def with_own(self, num_bytes: int) -> int:
        """Bytes with what the library asks for: of single pixels with a stride those that count, of one image, side by
        side; and a bias of whole blocks.
        """
        convolution = self.convolution
        if convolution.is_pointwise and convolution.is_strided:
            pixels = min(convolution.in_pixels, convolution.out_pixels)
            return num_bytes + _GUARD_BYTES + self.num_threads * convolution.in_channels * pixels * _FP32_BYTES
        if convolution.has_bias and (filled := self.filled(convolution.out_channels)) > convolution.out_channels:
            return num_bytes + _GUARD_BYTES + filled * _FP32_BYTES
        return num_bytes

    def sums_bytes(self, gradient_bytes: int) -> int:
        """Bytes of the weight's and the bias's gradients that are summed up, where threads share the images."""
        convolution = self.convolution
        divides_images = self.block == _WIDE_BLOCK or convolution.is_pointwise
        if self.num_threads == 1 or convolution.is_strided or convolution.groups > 1 or not divides_images:
            return 0
        bias_bytes = _BIAS_SUMS_BYTES * convolution.has_bias
        return (self.num_threads - 1) * gradient_bytes + _SUMS_GUARD_BYTES + bias_bytes

    @property
    def is_flat(self) -> bool:
        """Images of a few channels stay as they are."""
        convolution = self.convolution
        return convolution.groups == 1 and not convolution.is_transposed and convolution.in_channels < self.block

    @property
    def is_depthwise(self) -> bool:
        return 1 < self.convolution.groups == self.convolution.in_channels == self.convolution.out_channels

    def filled(self, channels: int) -> int:
        return -(-channels // self.block) * self.block

    @property
    def in_bytes(self) -> int:
        return self.convolution.batch * self.convolution.in_channels * self.convolution.in_pixels * _FP32_BYTES

    @property
    def out_bytes(self) -> int:
        return self.convolution.batch * self.convolution.out_channels * self.convolution.out_pixels * _FP32_BYTES

    def blocked_in_bytes(self, *, is_flat: bool = False) -> int:
        """No copy where it stays as it is."""
        if is_flat:
            return 0
        return self.convolution.batch * self.filled(self.convolution.in_channels) * self.convolution.in_pixels * _FP32_BYTES

    @property
    def blocked_out_bytes(self) -> int:
        return self.convolution.batch * self.filled(self.convolution.out_channels) * self.convolution.out_pixels * _FP32_BYTES

    @property
    def weight_bytes(self) -> int:
        convolution = self.convolution
        return convolution.in_channels * convolution.out_channels // convolution.groups * convolution.taps * _FP32_BYTES

    def blocked_weight_bytes(self, *, is_flat: bool = False) -> int:
        convolution = self.convolution
        if convolution.groups > 1:
            return self.weight_bytes
        in_channels = convolution.in_channels if is_flat else self.filled(convolution.in_channels)
        return in_channels * self.filled(convolution.out_channels) * convolution.taps * _FP32_BYTES
