"""Generated code without its kernels, for a trace: buffers and products are asked for as ever, fused kernels only noted.

Making machine code of kernels is most of the time that compiling takes, and needs a C++ compiler. What a step holds and moves is
decided before that.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import torch

NoteKernel = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Is given the tensors that a kernel reads and those that it writes."""
_SIGNATURE: Final = re.compile(r"\bkernel\((?P<arguments>[^)]*)\)")


@contextmanager
def without_kernels(note: NoteKernel, *, capturing: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, no kernel is compiled, and code that was generated inside calls ``note`` in place of each.

    capturing: makes what is entered while a block is captured and code generated.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    before = _traces[:]
    _traces[:] = [(note, capturing)]
    # A module that is loaded already has kernels, and one that is loaded here has none.
    PyCodeCache.cache_clear()
    try:
        with mock.patch.object(AsyncCompile, "cpp_pybinding", _make_stand_in):
            yield
    finally:
        PyCodeCache.cache_clear()
        _traces[:] = before


def around_capture() -> AbstractContextManager[None]:
    """Make what is to be entered while a block is captured: nothing but in a trace."""
    return _traces[-1][1]() if _traces else nullcontext()


_traces: list[tuple[NoteKernel, Callable[[], AbstractContextManager[None]]]] = []


def _make_stand_in(_: Any, argument_types: Sequence[str], source: str) -> Callable[..., None]:
    found = _SIGNATURE.search(source)
    names = [] if found is None else [each.split()[-1] for each in found["arguments"].split(",")]
    is_both = [name.startswith("in_out_ptr") for name in names] or [False] * len(argument_types)
    is_const = [kind.startswith("const ") for kind in argument_types]

    def note(*arguments: Any) -> None:
        kinds = zip(arguments, is_const, is_both, strict=True)
        given = [(tensor, const, both) for tensor, const, both in kinds if isinstance(tensor, torch.Tensor)]
        read = [tensor for tensor, const, both in given if const or both]
        _traces[-1][0](read, [tensor for tensor, const, _ in given if not const])

    return note
