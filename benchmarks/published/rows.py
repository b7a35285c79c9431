"""Published measurements as rows of ``rows.csv``, and the model, workload and plan that each is a run of.

The file holds what was published and where, nothing of ours. Which rows are in it is a rule, so that nobody picks the good ones:

- ``fitcheck``: every run of its T4 archive with SDPA attention (ours is never eager), the first of repeats.
- ``litgpt``: every single-GPU row of its resource tables of LoRA without double quantization, of models
  that the estimator builds.
- ``fsdp_qlora``: every row of its tables of two consumer cards, its layouts as the plans of ours that are nearest.
- of the collection of published runs (2,564 rows; ``select_runs``): no tensor or pipeline parallelism, no offload, at most one
  node, recompute full or none, fp16 or bf16, a device of the table, shape and step time complete; of runs that differ only in
  the number of devices or the global batch, the one on the fewest devices, then of the smallest batch.

Runs of several devices that name no layout are estimated as what one of them computes; what they send each other is not in the
estimate.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.published.models import PublishedModel, read_table
from optimizer.base.errors import InvalidInput
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DataParallel, DeviceLayout
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import Adapter, TrainingWorkload

Layout = Literal["", "replicated", "zero3", "streamed"]
ROWS_FILE = Path(__file__).with_name("rows.csv")
GB = 1e9
_TOKENS_PER_LITGPT_CHUNK = 128


@dataclass(frozen=True, kw_only=True)
class PublishedRow(PublishedModel):
    """One training run."""

    num_devices: int
    sequence_length: int
    micro_batch: int
    global_batch: int
    weights: Literal["fp32", "bf16", "fp16"]
    """Number format of weights that are not quantized."""
    frozen: Literal["same", "nf4"]
    adapter_rank: int | None
    adapter_targets: tuple[str, ...]
    adapter_dropout: float | None
    layout: Layout
    """Sharing among the devices: DDP, FSDP, or FSDP with all that is sharded on the host; empty where it is not compared."""
    torch_version: str
    """Version whose kernels ran, where the source says it and they hold other memory than those of the installed one."""
    recompute: Literal["none", "full"]
    allocated_gb: float | None
    """Peak of the allocator, in 10^9 bytes; so are the next two."""
    reserved_gb: float | None
    process_gb: float | None
    step_s: float | None
    compares_time: bool
    """No where the published program computes in a way that no plan of ours does."""
    extra_bytes_per_logit: int
    """Bytes that the published program holds at its peak for each logit beyond ours, by its source: transformers' loss upcasts,
    and the caller holds the logits."""

    @property
    def accumulation_steps(self) -> int:
        return self.global_batch // self.num_devices // self.micro_batch

    @property
    def extra_gb(self) -> float:
        return self.micro_batch * self.sequence_length * self.vocab * self.extra_bytes_per_logit / GB

    @property
    def num_positions_used(self) -> int:
        return self.sequence_length

    @property
    def shape_key(self) -> tuple[object, ...]:
        return (*super().shape_key, self.adapter_rank, self.adapter_targets)

    @property
    def num_compared_devices(self) -> int:
        return self.num_devices if self.layout else 1

    def workload(self) -> TrainingWorkload:
        adapter = None
        if self.adapter_rank is not None:
            adapter = Adapter(rank=self.adapter_rank, targets=self.adapter_targets, dropout=self.adapter_dropout or 0.0)
        return TrainingWorkload(
            sequence_length=self.sequence_length,
            global_batch_size=self.micro_batch * self.accumulation_steps * self.num_compared_devices,
            adapter=adapter,
            max_grad_norm=1.0 if adapter is None else None,
        )

    def plan(self, *, num_blocks: int) -> Plan:
        choice: Literal["recompute", "keep"] = "recompute" if self.recompute == "full" else "keep"
        tokens = self.micro_batch * self.sequence_length
        num_chunks = -(-tokens // _TOKENS_PER_LITGPT_CHUNK) if self.system == "litgpt" else 1
        is_streamed = self.layout == "streamed"
        home: Literal["host", "device"] = "host" if is_streamed else "device"
        return Plan(
            batch=BatchPlan(micro_batch_size=self.micro_batch, accumulation_steps=self.accumulation_steps),
            weights=WeightsPlan(dtype=self.weights, frozen=self.frozen, place=home),
            gradients=GradientsPlan(choice="host" if is_streamed else "keep"),
            optimizer_state=OptimizerStatePlan(place=home),
            layout=DeviceLayout(num_devices=self.num_compared_devices, data=_DATA[self.layout]),
            activations=ActivationsPlan(per_block=(choice,) * num_blocks),
            logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks),
        )


_DATA: dict[Layout, DataParallel] = {"": "replicated", "replicated": "replicated", "zero3": "zero3", "streamed": "zero2"}


def read_rows(file: Path = ROWS_FILE) -> list[PublishedRow]:
    """Read rows in the file's order. Raises InvalidInput where a row contradicts itself."""
    rows = read_table(PublishedRow, file)
    for row in rows:
        if row.accumulation_steps * row.micro_batch * row.num_devices != row.global_batch:
            raise InvalidInput(
                f"{row.name}: {row.num_devices} devices with micro-batches of {row.micro_batch} do not make a batch of "
                f"{row.global_batch}",
                field="global_batch",
                value=row.global_batch,
            )
    return rows


# The collection of published runs.


def select_runs(file: Path) -> list[PublishedRow]:
    """The rows of the collection that the rule above takes, in its order."""
    chosen: dict[tuple[object, ...], PublishedRow] = {}
    with file.open(newline="", encoding="utf-8") as stream:
        for cells in csv.DictReader(stream):
            row = _from_collection(cells)
            if row is None:
                continue
            key = (
                row.shape_key,
                row.system,
                row.device,
                row.sequence_length,
                row.micro_batch,
                row.recompute,
                row.weights,
            )
            held = chosen.get(key)
            if held is None or (row.num_devices, row.global_batch) < (held.num_devices, held.global_batch):
                chosen[key] = row
    return list(chosen.values())


_DEVICES = {
    "A100-40GB-SXM": "A100 40GB",
    "A100-80GB-SXM": "A100 80GB",
    "H100-80GB-SXM": "H100 SXM",
    "V100-32GB-SXM": "V100 32GB",
    "V100-32GB": "V100 32GB",
}
_DTYPES: dict[str, Literal["bf16", "fp16"]] = {"bf16": "bf16", "amp_bf16": "bf16", "fp16": "fp16"}
_MOST_DEVICES = 8
_OPEN_IN_FSDP = (
    "sharded over the devices: gathers and scatters taken as hidden, the update counted whole; ALiBi not counted"
)
_OPEN_IN_MEGATRON = (
    "gradients' all-reduce not counted; attention taken as fused and without dropout, Megatron's was neither; ZeRO and precision "
    "assumed by the collection"
)
_NEEDED = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "micro_batch", "global_batch", "step_time_s")


def _from_collection(cells: dict[str, str]) -> PublishedRow | None:
    is_alone = cells["tp"] == "1" and cells["pp"] == "1" and cells["offload"] == "none"
    is_known = cells["gpu"] in _DEVICES and cells["precision"] in _DTYPES and cells["recompute"] in ("none", "full")
    if not (is_alone and is_known and all(cells[name] for name in (*_NEEDED, "n_gpus"))):
        return None
    num_devices = int(cells["n_gpus"])
    family = {"Megatron-DeepSpeed": "megatron", "Composer FSDP FULL_SHARD": "mpt"}.get(cells["system"])
    if num_devices > _MOST_DEVICES or family is None:
        return None
    sizes = {name: int(cells[name]) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    seq, micro_batch = int(cells["seq"]), int(cells["micro_batch"])
    is_fsdp = family == "mpt"
    assumed = _OPEN_IN_FSDP if is_fsdp else _OPEN_IN_MEGATRON
    return PublishedRow(
        name=f"{cells['model']} {sizes['layers']}x{sizes['hidden']} s{seq} b{micro_batch} {num_devices}x{cells['gpu']} "
        f"{cells['recompute']}",
        source=cells["source"],
        system=cells["system"],
        device=_DEVICES[cells["gpu"]],
        num_devices=num_devices,
        model=cells["model"],
        family="mpt" if is_fsdp else "megatron",
        **sizes,
        head_dim=sizes["hidden"] // sizes["heads"],
        tied=True,
        sequence_length=seq,
        micro_batch=micro_batch,
        global_batch=int(cells["global_batch"]),
        weights=_DTYPES[cells["precision"]],
        frozen="same",
        adapter_rank=None,
        adapter_targets=(),
        adapter_dropout=None,
        layout="",
        torch_version="",
        recompute="full" if cells["recompute"] == "full" else "none",
        allocated_gb=None,
        reserved_gb=None,
        process_gb=None,
        step_s=float(cells["step_time_s"]),
        compares_time=True,
        extra_bytes_per_logit=0,
        open_facts=assumed,
    )
