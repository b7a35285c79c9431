"""What a convolution holds on the CPU beside its arguments and results, while it runs. Torch-free.

In fp32 torch has oneDNN do most of them (Convolution.cpp, ``use_mkldnn``), which wants its arguments in blocks of channels: the
input, the weight and, in backward, the gradient are there a second time, and so is each result until it is laid out again
(mkldnn/Conv.cpp). Channels are filled up to whole blocks, but for images of few channels. What a stride's backward makes has
its channels innermost, and is there three times. Where torch does it by itself (one small image, single pixels on one thread,
16 bits) it copies for each pixel the inputs that it is made from (``slow_conv2d``), but for single pixels.

Found with torch's profiler and ONEDNN_VERBOSE, on a processor with AVX2 (blocks of 8). *Not modelled*: blocks of 16 (AVX-512)
of channels that do not fill them, and 16 bits by oneDNN there, which hold less than is said here; sums of each thread in the
weight's gradient; buffers of strided and dilated backwards; 16 bits in groups; transposed ones of few channels.
"""

from collections.abc import Iterator
from typing import NamedTuple

from optimizer.profile.convolution import Convolution

_BLOCK = 8
_COLOURS = 3
"""Channels that the weight's gradient is made of without blocks."""
_FP32_BYTES = 4
_MANY_IMAGES = 16
"""From which on even single pixels are oneDNN's on one thread."""
_MANY_ELEMENTS = 20_480
"""Above which one image alone is oneDNN's."""
_LIBRARY_MIN_THREADS = 2
_GUARD_BYTES = 128
"""Beside what the library asks for itself."""


class Held(NamedTuple):
    """One moment of an op: bytes beside arguments and results, and more for each thread; only from so many threads on."""

    num_bytes: int
    per_thread_bytes: int = 0
    min_threads: int = 1
    is_packed: bool = False
    """Only where products in bf16 are a library's (``Machine.packs_bf16``)."""


def list_held(convolution: Convolution) -> tuple[Held, ...]:
    """Its moments that can be the highest."""
    gathered_bytes = convolution.gathered_bytes
    if not _can_be_library(convolution):
        return (Held(gathered_bytes + _columns_bytes(convolution)),)
    if convolution.is_backward:
        moments = list(_backward(convolution))
    else:
        result_bytes = _out_bytes(convolution)
        moments = [
            moment._replace(num_bytes=moment.num_bytes - result_bytes)
            for moment in _pass(convolution, towards_input=bool(convolution.is_transposed))
        ]
    if _is_library_on_one_thread(convolution):
        return tuple(moment._replace(num_bytes=moment.num_bytes + gathered_bytes) for moment in moments)
    more_threads = (
        moment._replace(num_bytes=moment.num_bytes + gathered_bytes, min_threads=_LIBRARY_MIN_THREADS) for moment in moments
    )
    return Held(gathered_bytes + _columns_bytes(convolution)), *more_threads


def _can_be_library(convolution: Convolution) -> bool:
    num_elements = convolution.batch * convolution.in_channels * convolution.in_pixels
    return convolution.element_bytes == _FP32_BYTES and bool(
        convolution.groups > 1 or convolution.kernel_is_large or convolution.batch > 1 or num_elements > _MANY_ELEMENTS
    )


def _is_library_on_one_thread(convolution: Convolution) -> bool:
    return bool(
        not convolution.is_pointwise
        or convolution.is_strided
        or convolution.is_dilated
        or convolution.batch >= _MANY_IMAGES
    )


def _columns_bytes(convolution: Convolution) -> int:
    """For every pixel of the side that is read by patches, each input of its kernel."""
    is_read = convolution.gives_weight_gradient or not convolution.is_backward
    if not is_read or (convolution.is_pointwise and not convolution.is_strided):
        return 0
    channels, pixels = convolution.in_channels, convolution.out_pixels
    if convolution.is_transposed:
        channels, pixels = convolution.out_channels, convolution.in_pixels
    patch = channels // convolution.groups * convolution.taps
    return convolution.batch * patch * pixels * convolution.element_bytes


def _backward(convolution: Convolution) -> Iterator[Held]:
    """First the input's gradient, then, beside it, the weight's; less what is returned."""
    input_bytes = _in_bytes(convolution) * convolution.gives_input_gradient
    bias_bytes = convolution.out_channels * _FP32_BYTES * convolution.has_bias
    weight_bytes = (_weight_bytes(convolution) + bias_bytes) * convolution.gives_weight_gradient
    if convolution.gives_input_gradient:
        for moment in _pass(convolution, towards_input=not convolution.is_transposed):
            yield moment._replace(num_bytes=moment.num_bytes - input_bytes - weight_bytes)
    if convolution.gives_weight_gradient:
        is_flat = _is_flat(convolution) and convolution.in_channels == _COLOURS
        blocked_bytes = _blocked_weight_bytes(convolution, is_flat=is_flat) + bias_bytes
        read_bytes = _blocked_in_bytes(convolution, is_flat=is_flat) + _blocked_out_bytes(convolution)
        yield _with_own(convolution, read_bytes + blocked_bytes - weight_bytes)
        yield Held(blocked_bytes)


def _pass(convolution: Convolution, *, towards_input: bool) -> Iterator[Held]:
    """From one side to the other, the result included. towards_input: as a backward does, and a transposed one forward."""
    if towards_input:
        is_turned = bool(convolution.is_strided) and not _is_depthwise(convolution)
        read_bytes, made_bytes = _blocked_out_bytes(convolution), _in_bytes(convolution)
        blocked_bytes = made_bytes
        if convolution.is_transposed:
            read_bytes, made_bytes = _blocked_in_bytes(convolution), _out_bytes(convolution)
            blocked_bytes = made_bytes
        elif not is_turned:
            blocked_bytes = _filled(convolution.in_channels) * convolution.batch * convolution.in_pixels * _FP32_BYTES
        yield Held(read_bytes + _blocked_weight_bytes(convolution) + blocked_bytes)
        yield Held(made_bytes * 3 if is_turned else blocked_bytes + made_bytes)
        return
    if convolution.is_transposed:
        read_bytes, made_bytes, blocked_bytes = (
            _blocked_out_bytes(convolution),
            _in_bytes(convolution),
            _blocked_in_bytes(convolution),
        )
    else:
        read_bytes, made_bytes, blocked_bytes = (
            _blocked_in_bytes(convolution, is_flat=_is_flat(convolution)),
            _out_bytes(convolution),
            _blocked_out_bytes(convolution),
        )
    weight_bytes = _blocked_weight_bytes(convolution, is_flat=_is_flat(convolution))
    yield _with_own(convolution, read_bytes + weight_bytes + blocked_bytes)
    yield Held(blocked_bytes + made_bytes)


def _with_own(convolution: Convolution, num_bytes: int) -> Held:
    """With what the library asks for: of single pixels with a stride those that count, of one image, side by side; and a bias of
    whole blocks.
    """
    if convolution.is_pointwise and convolution.is_strided:
        pixels = min(convolution.in_pixels, convolution.out_pixels)
        return Held(num_bytes + _GUARD_BYTES, convolution.in_channels * pixels * _FP32_BYTES)
    if convolution.has_bias and (filled := _filled(convolution.out_channels)) > convolution.out_channels:
        return Held(num_bytes + _GUARD_BYTES + filled * _FP32_BYTES)
    return Held(num_bytes)


def _is_flat(convolution: Convolution) -> bool:
    """Images of a few channels stay as they are."""
    return convolution.groups == 1 and not convolution.is_transposed and convolution.in_channels < _BLOCK


def _is_depthwise(convolution: Convolution) -> bool:
    return 1 < convolution.groups == convolution.in_channels == convolution.out_channels


def _filled(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _in_bytes(convolution: Convolution) -> int:
    return convolution.batch * convolution.in_channels * convolution.in_pixels * _FP32_BYTES


def _out_bytes(convolution: Convolution) -> int:
    return convolution.batch * convolution.out_channels * convolution.out_pixels * _FP32_BYTES


def _blocked_in_bytes(convolution: Convolution, *, is_flat: bool = False) -> int:
    """No copy where it stays as it is."""
    if is_flat:
        return 0
    return convolution.batch * _filled(convolution.in_channels) * convolution.in_pixels * _FP32_BYTES


def _blocked_out_bytes(convolution: Convolution) -> int:
    return convolution.batch * _filled(convolution.out_channels) * convolution.out_pixels * _FP32_BYTES


def _weight_bytes(convolution: Convolution) -> int:
    pairs = convolution.in_channels * convolution.out_channels // convolution.groups
    return pairs * convolution.taps * _FP32_BYTES


def _blocked_weight_bytes(convolution: Convolution, *, is_flat: bool = False) -> int:
    if convolution.groups > 1:
        return _weight_bytes(convolution)
    in_channels = convolution.in_channels if is_flat else _filled(convolution.in_channels)
    return in_channels * _filled(convolution.out_channels) * convolution.taps * _FP32_BYTES
