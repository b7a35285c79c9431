"""Captures a block's forward and backward as one graph each, and has torch's compiler (inductor) make code of them.

The block is run once on tensors without numbers, with its parameters as arguments, and torch's AOT autograd writes down both
passes and decides what the forward saves. No bytecode is read (that is Dynamo's part of ``torch.compile``), so there are no
guards and no graph breaks: what Python decides is decided by what was given, and ``blocks.py`` compiles anew for anything else.
A block whose Python code asks for the numbers of its tensors cannot be captured.

The settings keep a graph's buffers the same whatever the sizes: none is taken over by a later one because it happens to be as
large, and ops stay in the order in which they were written. Random numbers are torch's own, so that a forward that runs again
draws them again.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from optimizer.base.errors import BlockNotCompiled
from optimizer.runtime.compiled.generated import Generated
from optimizer.runtime.compiled.kernel_cache import choose_cache, leave_broken_cache
from optimizer.runtime.compiled.without_kernels import around_capture

SETTINGS: Final[dict[str, Any]] = {
    "allow_buffer_reuse": False,
    "reorder_for_peak_memory": False,
    "fallback_random": True,
    "fx_graph_cache": False,
    "triton.cudagraphs": False,
    "compile_threads": 1,
}
"""Settings in ``torch._inductor.config``. Graphs are not kept between runs, since torch keeps them as pickles; kernels are, as
the machine code that they are. One thread, for no pool of processes is to outlive the step; a block has few kernels."""
Forward = Callable[..., Any]


class Graph:
    """A block's forward as one node of autograd's graph, for inputs of one layout."""

    def __init__(self, block: nn.Module, forward: Forward, leaves: Sequence[Any], structure: Any) -> None:
        """leaves, structure: a call's arguments, flat (``torch.utils._pytree``).

        Raises BlockNotCompiled where the block cannot be captured, or no code be made of it.
        """
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._names = [name for name, _ in (*block.named_parameters(), *block.named_buffers())]
        self._codes: list[Generated] = []
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def run(own: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
            filled = list(constants)
            for place, tensor in zip(self._places, given, strict=True):
                filled[place] = tensor
            args, kwargs = pytree.tree_unflatten(filled, structure)
            with nn.utils.stateless._reparametrize_module(block, dict(zip(self._names, own, strict=True))):
                return forward(*args, **kwargs)

        self._call = self._compile(run, _own_tensors(block), [leaves[place] for place in self._places], block)

    def __call__(self, block: nn.Module, leaves: Sequence[Any]) -> Any:
        """Run the block, which may be any of its kind, on arguments of the same layout."""
        return self._call(_own_tensors(block), [leaves[place] for place in self._places])

    def _compile(
        self, run: Callable[..., Any], own: list[torch.Tensor], given: list[torch.Tensor], block: nn.Module
    ) -> Callable[..., Any]:
        layouts = [[_Layout.of(tensor) for tensor in tensors] for tensors in (own, given)]
        with _compiling():
            from torch._functorch.aot_autograd import aot_function
            from torch._inductor.decomposition import select_decomp_table
            from torch._subclasses.fake_tensor import FakeTensorMode

            captured: Callable[..., Any] = aot_function(
                run,
                fw_compiler=self._make_code(is_backward=False),
                bw_compiler=self._make_code(is_backward=True),
                partition_fn=_part,
                decompositions=select_decomp_table(),
            )
            with FakeTensorMode():
                stand_ins = [[layout.stand_in() for layout in listed] for listed in layouts]
            try:
                # Compiles, then asks the code to run, which it refuses here.
                captured(*stand_ins)
            except _Compiled:
                return captured
            except Exception as error:
                raise _not_compiled(block, error) from error
        raise _not_compiled(block, "it has no gradient to compile")

    def _make_code(self, *, is_backward: bool) -> Callable[..., Any]:
        def make(graph: Any, examples: Any) -> Any:
            # Backward's code is made where the first backward asks for it.
            with _compiling():
                code = Generated(_generate(graph, examples, is_backward=is_backward))
            self._codes.append(code)

            def run(args: list[Any]) -> Any:
                if any(_is_stand_in(arg) for arg in args):
                    raise _Compiled
                return code(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return make


def _part(joint: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Part a graph in forward and backward by what is least to save."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs)
    _copy_without_modes(backward)
    return forward, backward


def _copy_without_modes(graph: Any) -> None:
    """Have torch's copy of a graph, made where backward first asks for its code, unseen by the meter or a trace.

    The graph may hold tensors that the block's Python code writes down (Falcon's scale), and those would be copied on tensors
    without numbers.
    """
    kind = type(graph)  # torch makes one for each graph
    copied = kind.__deepcopy__

    def copy_graph(self: Any, memo: Any = None) -> Any:
        with _disable_current_modes():
            return copied(self, memo if memo is not None else {})

    kind.__deepcopy__ = copy_graph


def _generate(graph: Any, examples: Any, *, is_backward: bool) -> Any:
    from torch._inductor.compile_fx import compile_fx_inner

    untouched = copy.deepcopy(graph)
    try:
        return compile_fx_inner(graph, examples, is_backward=is_backward)
    except Exception as error:
        if not leave_broken_cache(error):
            raise
    return compile_fx_inner(untouched, examples, is_backward=is_backward)


class _Compiled(Exception):
    """Raised by code that is asked to run on stand-ins: it is there now."""


def _own_tensors(block: nn.Module) -> list[torch.Tensor]:
    return [*block.parameters(), *block.buffers()]


class _Layout(NamedTuple):
    """All of a tensor but its numbers. The device is what the tensor says: the CPU while a step is traced."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Layout":
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def stand_in(self) -> torch.Tensor:
        """Inside a FakeTensorMode."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


def _is_stand_in(value: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


@contextmanager
def _compiling() -> Iterator[None]:
    with warnings.catch_warnings():
        # Torch warns of parts of itself as it imports them.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch._inductor import config

        choose_cache()
        with _disable_current_modes(), around_capture(), config.patch(SETTINGS):
            yield


def _not_compiled(block: nn.Module, why: Exception | str) -> BlockNotCompiled:
    text = why if isinstance(why, str) else f"{type(why).__name__}: {' '.join(str(why).split())[:300]}"
    return BlockNotCompiled(type(block).__name__, text)
