"""The usual ways to generate for many prompts: transformers' ``generate``, with accelerate's offloading or another cache.

Each contender continues whole batches of prompts, greedily and by as many tokens as asked for, from the same weights.

On the CPU device accelerate's own offloading copies nothing: a weight in host memory is used where it lies, as is one in a mapped
file. There it reads its weights through ``Copying``, so that they come to the device as they would to a card. The blocks are
offloaded; what belongs to no block stays on the device, as in a plan that streams its weights.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.common.alternatives import DoesNotRun
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.generation import GenerationPlan
from optimizer.runtime.generation.generator import Generator, build_for_generation
from optimizer.runtime.meter.meter import Meter
from optimizer.workload import GenerationWorkload


@dataclass(frozen=True, kw_only=True)
class Job:
    """The same work for every contender."""

    spec: ModelSpec
    workload: GenerationWorkload
    device: torch.device
    scratch: Path
    """Folder of what goes to the disk."""


class DataMeter(Meter):  # type: ignore[no-untyped-call]
    """Leaves out tensors without data: what accelerate puts in the place of weights that are away."""

    def _see(self, tensor: torch.Tensor, slot: int) -> None:
        if not tensor.is_meta:
            super()._see(tensor, slot)


class Contender(Protocol):
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        """[batch, new tokens] for one batch [batch, prompt length]; both int64, on the host."""

    def close(self) -> None:
        """Let go of what would outlive the object."""


Factory = Callable[[Meter | None], Contender]
"""Builds a contender; None leaves it uncounted, as it would be used."""


class Ours:
    """A plan, carried out by the runtime."""

    def __init__(self, job: Job, plan: GenerationPlan, meter: Meter | None) -> None:
        self._num_new_tokens = job.workload.num_new_tokens
        model = build_for_generation(job.spec, weights=plan.weights, device=job.device, seed=job.workload.seed)
        self.generator = Generator(model, plan=plan, device=job.device, meter=meter, scratch=job.scratch)

    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        return self.generator.generate(prompts, num_new_tokens=self._num_new_tokens)

    def close(self) -> None:
        self.generator.close(keep_weights=False)


class Theirs:
    """transformers' ``generate``. prepare: changes the model once it is built; cache: options of ``generate``."""

    def __init__(
        self,
        job: Job,
        meter: Meter | None,
        *,
        prepare: Callable[[nn.Module, Job, Meter | None], None] | None = None,
        cache: Mapping[str, Any] | None = None,
    ) -> None:
        self._job = job
        self._meter = meter
        self._cache = dict(cache or {})
        self.model: Any = build_model(job.spec, dtype=torch.float32, device="cpu", seed=job.workload.seed).eval()
        if prepare is not None:
            prepare(self.model, job, meter)
        else:
            self.model.to(job.device)
        if meter is not None:
            meter.assign_module(self.model)

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        num_new_tokens = self._job.workload.num_new_tokens
        with ExitStack() as stack:
            if self._meter is not None:
                stack.enter_context(self._meter.translating())
                stack.enter_context(self._meter)
            ids = prompts.to(self._job.device, copy=True)
            tokens: torch.Tensor = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_new_tokens,
                min_new_tokens=num_new_tokens,
                do_sample=False,
                pad_token_id=0,
                **{"use_cache": True, **self._cache},
            )
        return tokens[:, -num_new_tokens:].cpu()

    def close(self) -> None:
        self.model = None


class Copying(Mapping[str, torch.Tensor]):
    """Weights that are copied as they are read, as on the way to a card; counted as weights."""

    def __init__(self, weights: Mapping[str, torch.Tensor], meter: Meter | None) -> None:
        self._weights = weights
        self._meter = meter

    def __getitem__(self, name: str) -> torch.Tensor:
        with nullcontext() if self._meter is None else self._meter.region("weights"):
            return self._weights[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def offload_to_host(model: nn.Module, job: Job, meter: Meter | None) -> None:
    """accelerate's ``cpu_offload`` of every block."""
    accelerate = _import_accelerate()
    _keep_rest(model, job.device)
    for block in find_blocks(model):
        held = {name: tensor.detach() for name, tensor in block.state_dict().items()}
        _offload(accelerate, block, held, job, meter)


def offload_to_disk(model: nn.Module, job: Job, meter: Meter | None) -> None:
    """accelerate's ``disk_offload`` of every block: one memory-mapped file for each tensor."""
    accelerate = _import_accelerate()
    utils: Any = importlib.import_module("accelerate.utils")
    _keep_rest(model, job.device)
    for index, block in enumerate(find_blocks(model)):
        folder = job.scratch / f"accelerate-{index}"
        utils.offload_state_dict(folder, block.state_dict())
        _offload(accelerate, block, utils.OffloadedWeightsLoader(save_folder=folder), job, meter)


def list_alternatives(job: Job) -> Iterator[tuple[str, Factory]]:
    """The contenders by name, the resident model first."""
    yield "transformers", lambda meter: Theirs(job, meter)
    yield "accelerate, host", lambda meter: Theirs(job, meter, prepare=offload_to_host)
    yield "accelerate, disk", lambda meter: Theirs(job, meter, prepare=offload_to_disk)
    yield "OffloadedCache", lambda meter: Theirs(job, meter, cache=_offloaded_cache(job))
    yield "accelerate, host, OffloadedCache", lambda meter: Theirs(
        job, meter, prepare=offload_to_host, cache=_offloaded_cache(job)
    )
    yield "QuantizedCache", lambda meter: Theirs(job, meter, cache=_quantized_cache())


def _offload(accelerate: Any, block: nn.Module, held: Mapping[str, torch.Tensor], job: Job, meter: Meter | None) -> None:
    weights = Copying(held, meter) if job.device.type == "cpu" else held
    accelerate.cpu_offload(block, execution_device=job.device, state_dict=weights)


def _keep_rest(model: nn.Module, device: torch.device) -> None:
    """Move all parameters but the blocks' to the device, where they stay."""
    inside = {id(parameter) for block in find_blocks(model) for parameter in block.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _import_accelerate() -> Any:
    try:
        return importlib.import_module("accelerate")
    except ImportError as error:
        raise DoesNotRun(f"accelerate is not installed ({error})") from error


def _offloaded_cache(job: Job) -> dict[str, Any]:
    if job.device.type != "cuda":
        raise DoesNotRun("transformers' offloaded cache needs CUDA")
    return {"cache_implementation": "offloaded"}


def _quantized_cache() -> dict[str, Any]:
    for backend, package in (("hqq", "hqq"), ("quanto", "optimum.quanto")):
        try:
            importlib.import_module(package)
        except ImportError:
            continue
        return {"cache_implementation": "quantized", "cache_config": {"backend": backend, "nbits": 4}}
    raise DoesNotRun("transformers' quantized cache needs hqq or optimum-quanto; neither is installed")
