"""The runtime reaches the device through one door."""

import ast
from pathlib import Path

import pytest
import torch

from optimizer.runtime.device.backend import Backend
from optimizer.runtime.device.backends import backend_of, in_place_of_its_device
from optimizer.runtime.device.cpu import CpuBackend
from optimizer.runtime.device.cuda import CudaBackend

ROOT = Path(__file__).resolve().parents[4]
CPU = torch.device("cpu")
_MODULES = {"cuda", "accelerator", "xpu", "mps", "hip"}
_CALLS = {"pin_memory", "cuda", "record_stream", "get_device_name"}


def list_doors(source: str) -> list[str]:
    """Names by which a module would reach a device by itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch.") and name.split(".")[1] in _MODULES:
                found.append(name)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            found.append("pin_memory")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            found += [node.module] if node.module.split(".")[1] in _MODULES else []
    return found


def test_nothing_else_in_the_runtime_names_cuda() -> None:
    runtime = ROOT / "optimizer/runtime"
    files = [file for file in runtime.rglob("*.py") if file.parent.name != "device"]
    assert len(files) > 50
    assert {str(file.relative_to(ROOT)): found for file in files if (found := list_doors(file.read_text()))} == {}


def test_every_way_around_the_door_is_found() -> None:
    ways = (
        "torch.cuda.synchronize()",
        "event: torch.cuda.Event",
        "torch.accelerator.current_stream()",
        "tensor.pin_memory()",
        "torch.empty(3, pin_memory=True)",
        "from torch.cuda import Stream",
    )
    assert all(list_doors(way) for way in ways)
    assert list_doors((ROOT / "optimizer/runtime/device/cuda.py").read_text())


def test_a_device_has_one_backend_of_its_own_kind() -> None:
    assert isinstance(backend_of(CPU), CpuBackend)
    assert backend_of(CPU) is backend_of(torch.device("cpu"))
    # Made without touching the card, of which there may be none.
    card = backend_of(torch.device("cuda:7"))
    assert isinstance(card, CudaBackend)
    assert card.device == torch.device("cuda:7")


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="xpu:0 is no device that plans run on; those are cpu, cuda"):
        backend_of(torch.device("xpu:0"))


def test_another_backend_stands_in_for_a_while() -> None:
    other, plain = CpuBackend(CPU), backend_of(CPU)
    with in_place_of_its_device(other):
        assert backend_of(CPU) is other
    assert backend_of(CPU) is plain


def test_the_cpu_is_synchronous_and_pins_nothing() -> None:
    backend: Backend = CpuBackend(CPU)
    assert backend.make_stream() is None
    assert backend.memory is None
    assert backend.random_state() is None
    data = torch.ones(3)
    assert backend.pin(data) is data
    assert backend.register(data) == 0
    assert backend.empty_pinned(16).nbytes == 16
    assert backend.computes_bf16
    for call in (backend.current_stream, lambda: backend.on(None), lambda: backend.set_random_state(data)):
        with pytest.raises(NotImplementedError, match="the CPU device"):
            call()
