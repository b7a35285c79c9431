"""Imports torch and transformers without what a trace never runs. For a process that does nothing but trace: ``keep/child.py``.

To import one architecture of transformers takes three times what tracing it takes: with it come generation, tokenizers,
distributed tensors, torch's compiler, a client of the model hub, and losses of vision models with all of scipy. Here those are
modules that hold nothing. A name imported from one is an empty class; whoever calls, inherits from or asks such a class for
anything real fails, and the process then starts again with everything. So this can cost time, never exactness: a test holds
profiles made both ways equal.

Only names are listed, of modules, in the layout of transformers 5; another layout means a slower start.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import operator
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

_PACKAGES = ("transformers", "transformers.models")
"""Their own code lists every architecture there is; without it their modules are found all the same."""
_EMPTY = (
    "accelerate",
    "httpx",
    "httpx2",
    "jinja2",
    "scipy",
    "sympy",
    "torch._dynamo",
    "torch._export",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._meta_registrations",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributions",
    "torch.export",
    "torch.fx.experimental.symbolic_shapes",
    "torch.hub",
    "torch.nn.intrinsic",
    "torch.quantization",
    "torch.utils._sympy",
    "torch.utils.data",
    "torchgen",
    "transformers.distributed",
    "transformers.dynamic_module_utils",
    "transformers.generation",
    "transformers.integrations.accelerate",
    "transformers.integrations.peft",
    "transformers.loss",
    "transformers.models.auto",
    "transformers.processing_utils",
    "transformers.quantizers",
    "transformers.safetensors_conversion",
    "transformers.tokenization_python",
    "transformers.tokenization_utils_base",
    "transformers.utils.auto_docstring",
    "transformers.utils.chat_template_utils",
    "transformers.utils.hub",
    "transformers.utils.loading_report",
    "yaml",
)
"""Modules that hold nothing, with all that lies under them."""
_REAL = ("transformers.generation.configuration_utils", "transformers.loss.loss_utils")
"""Modules under an empty one that are needed."""
_WITH_META_KERNELS = ("torch._export", "torch._higher_order_ops", "torch._meta_registrations", "torch.export")
"""Modules that ``import_meta_kernels`` imports after all, and those that its kernels are built on."""
_left_out: set[str] = set()


def import_lean() -> None:
    """Let this process import less from now on. Call it before torch and transformers are imported, and never in a
    process that trains, generates or saves.
    """
    _left_out.update(_EMPTY)
    sys.meta_path.insert(0, _Finder())


def import_meta_kernels() -> bool:
    """torch's kernels in Python for tensors without data, where this process has left them out so far; False where it has not.

    Two thirds of a second, for ops without a kernel in C++ and none in ``meta_ops.py``.
    """
    if not _left_out.intersection(_WITH_META_KERNELS):
        return False
    _left_out.difference_update(_WITH_META_KERNELS)
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty) and not _is_left_out(name)]:
        del sys.modules[name]
    importlib.import_module("torch._meta_registrations")
    return True


def _is_left_out(name: str) -> bool:
    return name not in _REAL and any(name == left_out or name.startswith(f"{left_out}.") for left_out in _left_out)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _PACKAGES and not _is_left_out(fullname):
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True, origin=found.origin)
        spec.submodule_search_locations = list(found.submodule_search_locations or [])
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Empty(spec.name) if spec.name not in _PACKAGES else ModuleType(spec.name)
        for name, value in _STAND_INS.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformers":
            module.__version__ = version("transformers")  # type: ignore[attr-defined]


class _Empty(ModuleType):
    """Every public name imported from it is a class of that name, without anything in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in _STAND_INS:
            return importlib.import_module(f"{self.__name__}.{name}")
        source = _RE_EXPORTS.get((self.__name__, name))
        value = getattr(importlib.import_module(source), name) if source else _empty_class(name)
        setattr(self, name, value)
        return value


def _empty_class(name: str) -> type:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(f"{name} was left out of a process that only traces")

    return type(name, (), {"__init__": refuse, "__class_getitem__": classmethod(lambda cls, _: cls)})


class _DistributedMixin:
    """A base class of every model calls this when it is built; there is nothing to spread over devices."""

    def init_parallel_plans(self) -> None:
        """Leave out tensor, pipeline and expert parallelism."""


class _HubMixin:
    def push_to_hub(self) -> None:
        """Copied by transformers, with this text, when its classes are made."""


def _same(value: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator that changes nothing, with arguments or without."""
    return value if callable(value) else _same


def _of_number(value: Any, *_: Any) -> Any:
    """Answers what torch asks of a size or a condition that may be a symbol; none is here."""
    if not isinstance(value, bool | int | float):
        raise RuntimeError(f"{type(value).__name__} in a process that knows no symbolic sizes")
    return value


def _no(*_: Any, **__: Any) -> bool:
    return False


_ASKED_OF_NUMBERS = (
    "expect_true",
    "guard_bool",
    "guard_int",
    "guard_or_false",
    "guard_or_true",
    "guard_scalar",
    "guard_size_oblivious",
    "statically_known_true",
)
_STAND_INS: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "allow_in_graph": _same,
        "assume_constant_result": _same,
        "disable": _same,
        "is_compiling": _no,
    },
    "torch._dynamo.config": {"_custom_ops_profile": None, "error_on_nested_fx_trace": True},
    "torch.fx.experimental.symbolic_shapes": {
        "free_unbacked_symbols": _no,
        "has_free_symbols": _no,
        "has_free_unbacked_symbols": _no,
        "is_nested_int": _no,
        "is_symbolic": _no,
        "sym_and": lambda *conditions: all(conditions),
        "sym_eq": operator.eq,
        "sym_or": lambda *conditions: any(conditions),
    }
    | dict.fromkeys(_ASKED_OF_NUMBERS, _of_number),
    "transformers.distributed.mixin": {"DistributedMixin": _DistributedMixin},
    "transformers.distributed.utils": {"is_dtensor": _no},
    "transformers.generation": {"GenerationMixin": type("GenerationMixin", (), {})},
    "transformers.integrations.peft": {"PeftAdapterMixin": type("PeftAdapterMixin", (), {})},
    "transformers.utils.auto_docstring": {"auto_class_docstring": _same, "auto_docstring": _same},
    "transformers.utils.hub": {"PushToHubMixin": _HubMixin},
}
"""Names that are called or inherited from while a model is imported and built."""
_RE_EXPORTS = {
    ("transformers.generation", "CompileConfig"): "transformers.generation.configuration_utils",
    ("transformers.generation", "GenerationConfig"): "transformers.generation.configuration_utils",
}
"""Names that a package takes from a module of its own."""
