"""Training loops of the tools that fit a model into less memory today; they take the same step on the same data.

A contender takes optimizer steps and can be closed; ours wraps the runtime's Trainer, the others are transformers' own loop
with what its ecosystem offers: gradient checkpointing, ``save_on_cpu``, FSDP2 with CPU offload, and the offload optimizers of
torchao and DeepSpeed where they run. All start from the same weights, see the same tokens, clip to the same norm and step with
AdamW, fused where the library allows it.

On the CPU device torch's own offloading copies nothing, so ``save_on_cpu`` is its two hooks with real copies, counted on the
host tier. What FSDP2 keeps on the CPU (shards, state) is counted on the host tier too; its gradients are taken off its peak.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.prepare import build_prepared, prepare_model
from optimizer.runtime.layers.matmul_dispatch import watch_products
from optimizer.runtime.layers.memory_saving_layers import use_memory_saving_layers
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.step.weights import torch_dtype
from optimizer.workload import TrainingWorkload


class DoesNotRun(Exception):
    """This alternative cannot run here; says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The same work for every contender."""

    spec: ModelSpec
    workload: TrainingWorkload
    device: torch.device
    autocast: bool = False
    """The others compute in bf16 on fp32 weights; ours does as its plan says."""
    draws_quickly: bool = False
    """Weights are filled from a short run of random numbers: minutes less for billions of them."""

    def build(self, weights: WeightsPlan) -> nn.Module:
        if self.draws_quickly:
            return build_quickly(self.spec, weights=weights, workload=self.workload, device=self.device)
        return build_prepared(self.spec, weights=weights, workload=self.workload, device=self.device)

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and next tokens of one step, ``[global batch, sequence]``: a pattern that can be learnt, with some noise."""
        generator = torch.Generator().manual_seed(self.workload.seed)
        length, batch = self.workload.sequence_length + 1, self.workload.global_batch_size
        starts = torch.randint(self.spec.vocab_size, (batch, 1), generator=generator)
        text = (starts + 7 * torch.arange(length)) % self.spec.vocab_size
        noise = torch.randint(self.spec.vocab_size, (batch, length), generator=generator)
        text = torch.where(torch.rand(batch, length, generator=generator) < 0.1, noise, text)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def micro_batches(self, num_micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        ids, labels = self.tokens()
        return list(zip(ids.chunk(num_micro_batches), labels.chunk(num_micro_batches), strict=True))


class Contender(Protocol):
    def step(self) -> float:
        """One optimizer step; returns the loss."""

    def close(self) -> None:
        """Let go of what would outlive the object."""


_RUN_ELEMENTS = 1_000_003
"""No divisor of any width, so that no two rows are alike."""

Factory = Callable[[Meter | None], Contender]
"""Builds a contender; None leaves it uncounted, as it would be used."""


class Ours:
    """A plan, carried out by the runtime."""

    def __init__(self, job: Job, plan: Plan, meter: Meter | None) -> None:
        model = job.build(plan.weights)
        self.trainer = Trainer(model, plan=plan, workload=job.workload, device=job.device, meter=meter)
        self._batches = job.micro_batches(plan.batch.accumulation_steps)
        self._learning_rate = job.workload.learning_rate

    def step(self) -> float:
        return self.trainer.step(self._batches, learning_rate=self._learning_rate).loss

    def close(self) -> None:
        self.trainer.close()


class Loop:
    """The training loop of transformers' users, bare or with one technique."""

    def __init__(
        self,
        job: Job,
        meter: Meter | None,
        *,
        num_micro_batches: int = 1,
        checkpointing: bool = False,
        offloads: bool = False,
        saves_on_cpu: bool = False,
        quick_products: bool = False,
        light_layers: bool = False,
    ) -> None:
        """quick_products: made as the runtime makes them (``runtime/layers/matmul_dispatch.py``), where torch's own way
        is slower. light_layers: norms and capped scores save what the runtime's do.
        """
        self.model = job.build(WeightsPlan())
        if checkpointing:
            enable_checkpointing(self.model, offloads=offloads)
        self._job = job
        self.meter = meter
        self.batches = job.micro_batches(num_micro_batches)
        self._saving = _SaveOnHost(meter, job.device) if saves_on_cpu else None
        if meter is not None:
            meter.assign_module(self.model)
            if job.device.type == "cpu":
                # Elsewhere counted when they are copied there, as the runtime's are everywhere.
                for tensor in (tensor for batch in self.batches for tensor in batch):
                    meter.assign(tensor, "temporaries")
        self._undo: list[Callable[[], None]] = []
        if light_layers:
            self._undo.append(use_memory_saving_layers(self.model))
        if quick_products and job.device.type == "cpu":
            self._undo.append(watch_products(self.model))
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        return make_adamw(self.model, self._job.workload, fused=True)

    def step(self) -> float:
        if self.meter is not None:
            self.meter.reset_peak()
        with ExitStack() as stack:
            if self.meter is not None:
                stack.enter_context(self.meter.translating())
                stack.enter_context(self.meter)
            loss = self._accumulate()
            max_norm = self._job.workload.max_grad_norm
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            with self.updating():
                self.optimizer.step()
            self.optimizer.zero_grad()
        if self._job.device.type == "cuda":
            torch.cuda.synchronize(self._job.device)
        return loss

    def updating(self) -> AbstractContextManager[None]:
        """Around the optimizer's step."""
        return nullcontext()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _accumulate(self) -> float:
        total = 0.0
        for ids, labels in self.batches:
            ids, labels = ids.to(self._job.device), labels.to(self._job.device)
            saving = self._saving.hooks() if self._saving is not None else nullcontext()
            with saving, torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=self._job.autocast):
                loss = self.model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss
            (loss / len(self.batches)).backward()
            total += float(loss.detach()) / len(self.batches)
        return total


class _SaveOnHost:
    """``torch.autograd.graph.save_on_cpu``; on the CPU device with copies that are there."""

    def __init__(self, meter: Meter | None, device: torch.device) -> None:
        self._meter = meter
        self._device = device

    def hooks(self) -> AbstractContextManager[Any]:
        if self._device.type == "cuda":
            return save_on_cpu(pin_memory=True)
        return saved_tensors_hooks(self._pack, torch.Tensor.clone)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self._meter is None else self._meter.region("activations", tier="host"):
            return tensor.clone()


class Sharded(Loop):
    """FSDP2 with CPU offload, one process: shards, gradients and state on the host, weights gathered block by block."""

    def make_optimizer(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        device = self._job.device
        _join_group(device)
        mesh = init_device_mesh(device.type, (1,))
        options: dict[str, Any] = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
        with self._on_host("weights"):
            for block in find_blocks(self.model):
                fully_shard(block, **options)
            fully_shard(self.model, **options)
        return make_adamw(self.model, self._job.workload, fused=True)

    def updating(self) -> AbstractContextManager[None]:
        return self._on_host("optimizer_state")

    def _on_host(self, category: Any) -> AbstractContextManager[Any]:
        if self.meter is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(self.meter)
        stack.enter_context(self.meter.region(category, tier="host"))
        return stack


class AoOffload(Loop):
    """torchao's CPUOffloadOptimizer: state and update on the CPU, gradients moved as they appear. It cannot clip."""

    def make_optimizer(self) -> Any:
        if self._job.device.type != "cuda":
            raise DoesNotRun("torchao's CPUOffloadOptimizer runs on CUDA and XPU only")
        try:
            torchao: Any = importlib.import_module("torchao.optim")
        except ImportError as error:
            raise DoesNotRun(f"torchao is not installed ({error})") from error
        workload = self._job.workload
        return torchao.CPUOffloadOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            offload_gradients=True,
            fused=True,
            lr=workload.learning_rate,
            betas=(workload.beta1, workload.beta2),
            eps=workload.epsilon,
        )


class DeepSpeedOffload(Loop):
    """DeepSpeed's ZeRO-Offload: stage 2 with one rank, its CPUAdam on the host."""

    def make_optimizer(self) -> Any:
        try:
            deepspeed: Any = importlib.import_module("deepspeed")
        except ImportError as error:
            raise DoesNotRun(f"DeepSpeed is not installed ({error})") from error
        workload = self._job.workload
        settings = {
            "train_micro_batch_size_per_gpu": self.batches[0][0].shape[0],
            "gradient_accumulation_steps": len(self.batches),
            "gradient_clipping": workload.max_grad_norm or 0.0,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": workload.learning_rate, "betas": [workload.beta1, workload.beta2]},
            },
        }
        _join_group(self._job.device)
        self._engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=list(self.model.parameters()), config=settings
        )
        return self._engine

    def step(self) -> float:
        if self.meter is not None:
            self.meter.reset_peak()
        total = 0.0
        with nullcontext() if self.meter is None else self.meter:
            for ids, labels in self.batches:
                ids, labels = ids.to(self._job.device), labels.to(self._job.device)
                loss = self._engine(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss
                self._engine.backward(loss)
                self._engine.step()
                total += float(loss.detach()) / len(self.batches)
        return total


def enable_checkpointing(model: Any, *, offloads: bool = False) -> None:
    """transformers' gradient checkpointing, by its newer name where it has one; that one can also offload what it keeps."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options, offload=offloads)
    elif offloads:
        raise DoesNotRun("this version of transformers does not offload what checkpointing keeps")
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def build_quickly(
    spec: ModelSpec, *, weights: WeightsPlan, workload: TrainingWorkload, device: torch.device
) -> nn.Module:
    """Build as ``build_prepared`` does; weights repeat one run of random numbers, norms start at one, offsets at zero."""
    from transformers.initialization import no_init_weights

    streams = weights.place != "device"
    with no_init_weights():
        model = build_model(spec, dtype=torch_dtype(weights), device="cpu" if streams else device, seed=workload.seed)
    tie: Any = getattr(model, "tie_weights", None)
    if spec.tied_embeddings and tie is not None:
        # Left undone with the drawing.
        tie()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            run = (torch.randn(_RUN_ELEMENTS) * 0.02).to(parameter.dtype).to(parameter.device)
            flat = parameter.data.view(-1)
            whole = flat[: flat.numel() // _RUN_ELEMENTS * _RUN_ELEMENTS]
            whole.view(-1, _RUN_ELEMENTS).copy_(run)
            flat[whole.numel() :].copy_(run[: flat.numel() - whole.numel()])
        else:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
    prepare_model(model, weights=weights, workload=workload, device=device)
    return model if streams else model.to(device)


def make_adamw(model: nn.Module, workload: TrainingWorkload, *, fused: bool) -> torch.optim.AdamW:
    """The runtime's own settings: weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": workload.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (workload.beta1, workload.beta2)
    return torch.optim.AdamW(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon, fused=fused)


def list_alternatives(job: Job) -> Iterator[tuple[str, Factory]]:
    """The contenders by name, the plain loop first; accumulation at a half, a quarter and one sequence."""
    yield "transformers", lambda meter: Loop(job, meter)
    batch = job.workload.global_batch_size
    cuts = sorted({cut for cut in (2, 4, batch) if 1 < cut <= batch and batch % cut == 0})
    for cut in cuts:
        yield f"transformers, {cut} micro-batches", _loop(job, num_micro_batches=cut)
    yield "gradient checkpointing", _loop(job, checkpointing=True)
    for cut in cuts:
        yield f"gradient checkpointing, {cut} micro-batches", _loop(job, num_micro_batches=cut, checkpointing=True)
    if job.device.type == "cuda":
        # On the CPU device it would copy nothing and save nothing.
        yield "gradient checkpointing, offloaded", _loop(job, checkpointing=True, offloads=True)
    yield "save_on_cpu", _loop(job, saves_on_cpu=True)
    for cut in cuts[-1:]:
        yield f"save_on_cpu, {cut} micro-batches", _loop(job, num_micro_batches=cut, saves_on_cpu=True)
    yield "FSDP2 CPUOffloadPolicy", lambda meter: Sharded(job, meter)
    yield "FSDP2 CPUOffloadPolicy, checkpointing", lambda meter: Sharded(job, meter, checkpointing=True)
    yield "torchao CPUOffloadOptimizer", lambda meter: AoOffload(job, meter)
    yield "DeepSpeed ZeRO-Offload", lambda meter: DeepSpeedOffload(job, meter)


def gradients_in_favour_bytes(contender: Contender, device: torch.device) -> int:
    """Bytes to take off a measured peak: FSDP2's gradients are on the host by its policy, which the CPU device cannot see."""
    if device.type == "cpu" and isinstance(contender, Sharded):
        return sum(parameter.numel() * parameter.element_size() for parameter in contender.model.parameters())
    return 0


def _loop(job: Job, **options: Any) -> Factory:
    return lambda meter: Loop(job, meter, **options)


def _join_group(device: torch.device) -> None:
    """A group of this process alone, on the loopback."""
    dist: Any = importlib.import_module("torch.distributed")

    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
