"""Memory that a CUDA process takes of a card beside its tensors: the context, and the matrix libraries' workspaces. Torch-free.

A probe measures both on its machine, and what it found is used in place of the table. The table is for cards nobody here has
run: each row says where it is from, and where nothing was found that it is assumed.

Workspaces come from torch's own allocator, so they are reserved memory like any tensor's: 8,519,680 bytes for each handle and
stream before Hopper and 32 MiB from there on, but as ``runtime/meter/device.py`` sets ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, 32 MiB
everywhere. Forward and backward run on threads with a handle each (``reserve_workspaces``).
Source: torch, ``aten/src/ATen/cuda/CublasHandlePool.cpp``; pull requests 168175, 175879, 173002 (cublasLt's) and 194311.

*Not modelled*: a further buffer for each further stream that multiplies; the runtime multiplies on one.
"""

from dataclasses import dataclass

from optimizer.base.intervals import ByteInterval, exact_interval
from optimizer.base.units import MIB
from optimizer.hardware.device_spec import Card
from optimizer.hardware.device_table import read_devices
from optimizer.hardware.machine import Device

WORKSPACE_BYTES = 32 * MIB
"""Workspace of one handle, as the runtime configures it: eight buffers of 4 MiB."""
NUM_HANDLES = 2
"""Forward's thread and backward's."""
LT_WORKSPACE_BYTES = MIB
"""Workspace of cublasLt for each handle, at most, in torch before 2.12; from there on it takes what cuBLAS has."""
_SHARED_SINCE, _READ_UNTIL = (2, 12), (2, 13)
"""Versions of torch: since when cublasLt has no workspace of its own, and the last whose sources were read. A later one may keep
none between products."""
_FEWEST_MULTIPROCESSORS, _MOST_MULTIPROCESSORS = 10, 264


@dataclass(frozen=True, kw_only=True)
class ContextSize:
    """The CUDA context of one process that trains, kernels that were loaded included."""

    num_bytes: ByteInterval
    source: str


def _mib(low: int, value: int, high: int) -> ByteInterval:
    return ByteInterval(low=low * MIB, value=value * MIB, high=high * MIB)


_LAZY = "pytorch#107667 and #109888 (2023): 300 to 400 MiB with lazily loaded kernels, card not named"
CONTEXT_SIZES: dict[str, ContextSize] = {
    "6.0": ContextSize(num_bytes=_mib(200, 300, 450), source="assumed from Volta"),
    "7.0": ContextSize(num_bytes=_mib(250, 320, 450), source=_LAZY),
    "7.5": ContextSize(num_bytes=_mib(130, 141, 300), source="T4, torch 2.10 to 2.14: 140.9 MiB (fitcheck-llm 0.3.1)"),
    "8.0": ContextSize(num_bytes=_mib(300, 420, 600), source=_LAZY),
    "8.6": ContextSize(num_bytes=_mib(250, 350, 500), source=_LAZY),
    "8.9": ContextSize(
        num_bytes=_mib(300, 426, 560), source="RTX 6000 Ada, torch 2.10, CUDA 13.0: 426 MiB (unsloth-zoo#1053)"
    ),
    "9.0": ContextSize(num_bytes=_mib(400, 500, 700), source="assumed: more processors than Ada, more kernels"),
    "10.0": ContextSize(num_bytes=_mib(400, 550, 800), source="assumed from Hopper"),
    "12.0": ContextSize(num_bytes=_mib(300, 450, 700), source="assumed from Ada"),
}
"""Sizes of contexts by compute capability."""


def find_context(device: Device) -> ContextSize | None:
    """The context as measured on the card where a probe has been there, else from the table; None for a card of unknown
    kind.
    """
    if device.context_bytes is not None:
        return ContextSize(num_bytes=_near(device.context_bytes), source="measured by the probe")
    return CONTEXT_SIZES.get(device.compute_capability)


def read_card(device: Device, *, torch_version: str = "") -> Card:
    """The card's facts. Multiprocessors nobody counted are those of the table's cards of the same compute capability."""
    capability = _read_version(device.compute_capability)
    if device.num_multiprocessors is not None:
        return Card(capability, (device.num_multiprocessors,) * 3, _read_version(torch_version))
    alike = sorted(spec.num_sms for spec in read_devices().values() if _read_version(spec.compute_capability) == capability)
    known = (alike[0], alike[-1], alike[-1]) if alike else (_FEWEST_MULTIPROCESSORS, _MOST_MULTIPROCESSORS, _MOST_MULTIPROCESSORS)
    return Card(capability, known, _read_version(torch_version))


def find_workspaces(device: Device, *, torch_version: str = "") -> ByteInterval:
    """Predict both handles' workspaces. torch_version: empty where it is not known."""
    if device.workspace_bytes is not None:
        return exact_interval(device.workspace_bytes)
    value = NUM_HANDLES * WORKSPACE_BYTES
    version = _read_version(torch_version)
    low = 0 if version is None or version > _READ_UNTIL else value
    own_bytes = 0 if version is not None and version >= _SHARED_SINCE else NUM_HANDLES * LT_WORKSPACE_BYTES
    return ByteInterval(low=low, value=value, high=value + own_bytes)


def _read_version(text: str) -> tuple[int, int] | None:
    """Major and minor number of ``2.13.0+cu130`` or ``8.9``; None where there are none."""
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def bytes_beside_tensors(device: Device) -> int:
    """Context and workspaces, of a card of unknown kind the largest context of the table."""
    largest = max(size.num_bytes.value for size in CONTEXT_SIZES.values())
    context = find_context(device)
    return (largest if context is None else context.num_bytes.value) + find_workspaces(device).value


def _near(num_bytes: int) -> ByteInterval:
    """A context grows with every kernel that is loaded after the measurement."""
    return ByteInterval(low=num_bytes, value=num_bytes, high=num_bytes + num_bytes // 10)
