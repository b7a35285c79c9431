"""Six systems on eight RTX 4090s: which of five models fit, how fast they train, and how long a sequence may be.

``pools.csv`` has what was published: github ITcarrot/RoundPipe-artifact, exp/raw-data.csv, with the micro-batches and longest
sequences of the scripts beside it; empty where memory ran out. Nothing is fitted. Rules by which rows are plans of ours:

- All compute in fp16 with fp32 masters, recompute every block, and let the allocator's segments grow. The scripts let products
  add up in fp16, which GeForce cards do at twice the rate of the table (``devices.toml``); attention does not.
- zero2, fsdp (ZeRO-3): as here. zero_infinity: ZeRO-2 with weights, gradients and state on the host. megatron_pp: 1F1B with the
  script's cut. mobius, roundpipe_sync: the pool, its stages of one, two or four blocks, whichever is fastest of those that fit.
- A pool that does its micro-batches in groups needs memory for ``num_at_once``; its time is that of a step of all of them.
- The systems that run transformers' models take its loss, which holds 8 bytes for each logit beyond ours; roundpipe_sync makes
  it in chunks, and Megatron's holds what ours does.
- Longest sequences are of one sequence a micro-batch, one micro-batch for each device of a layout without stages, else as many
  as there are at once, in steps of 1,024. RoundPipe's are of its asynchronous optimizer.
- Where memory ran out and no size is known: one sequence. Mobius has no public source: its micro-batches are the largest that
  divide the batch and have no more tokens than its longest sequence, as many at once as there are devices.

How the cards are connected is not published: pairs of them share a PCIe link to the host, as the table assumes of eight, and
beside that stands what it would be if four did.

*Otherwise than there*: a cut model's embedding and head are two tensors, which Qwen3-1.7B ties; a cut gpt-oss is Mixtral of the
same sizes; FSDP's unsummed gradients between micro-batches are summed at once; adapters are on all matrices outside of experts.
*Not here*: Megatron's tensor parallel rows, and RoundPipe's asynchronous optimizer, which no plan of ours does.
"""

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.common.record import GoalEntry, Row, goal
from optimizer.base.errors import HeadroomError
from optimizer.base.units import GIB
from optimizer.estimate.card.training_memory import add_memory
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.training import estimate_training
from optimizer.formats.stock_layers import stock_layers
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.any_spec import read_any_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.extent import Extent
from optimizer.profile.keep.obtain import obtain_profile
from optimizer.profile.profile import Profile
from optimizer.search.cutting import even_cut
from optimizer.workload import Adapter, TrainingWorkload

System = Literal["zero2", "zero_infinity", "fsdp", "megatron_pp", "mobius", "roundpipe_sync"]
ROWS_FILE: Final = Path(__file__).with_name("pools.csv")
NUM_DEVICES: Final = 8
HOST_BYTES: Final = 800 * GIB
SEQUENCE_LENGTH: Final = 2048
ADAPTER_RANK: Final = 32
_POOLS: Final = ("mobius", "roundpipe_sync")
_ON_HOST: Final = ("zero_infinity", *_POOLS)
_OWN_LOSS: Final = ("megatron_pp", "roundpipe_sync")
_STAGE_SIZES: Final = (1, 2, 4)
_EXTRA_BYTES_PER_LOGIT: Final = 8
_TOKENS_PER_CHUNK: Final = 1024
_STEP_OF_LENGTHS: Final = 1024
_LONGEST: Final = 128
"""Steps of 1,024 that a workload may have."""

_QWEN3: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_GPT_OSS: Final[dict[str, Any]] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-1.7B": _QWEN3,
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20B": {**_GPT_OSS, "model_type": "gpt_oss", "sliding_window": 128},
    "Qwen3-32B": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "Qwen3-235B LoRA": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
"""Published config.json documents, with as many positions as any row needs."""
_CUT_MODELS: Final[dict[str, dict[str, Any]]] = {
    "Qwen3-1.7B": {**_QWEN3, "tie_word_embeddings": False},
    "gpt-oss-20B": {**_GPT_OSS, "model_type": "mixtral"},
}


@dataclass(frozen=True, kw_only=True)
class PoolRow:
    """One system with one model."""

    system: System
    model: str
    micro_batch: int
    num_micro_batches: int
    """In a step, of each device of a layout without stages."""
    num_at_once: int
    """The number of these that the memory has to hold."""
    tokens_per_s: float | None
    """None where memory ran out."""
    longest_tokens: int | None

    @property
    def is_cut(self) -> bool:
        return self.system in ("megatron_pp", *_POOLS)

    def layouts(self, depth: int) -> list[DeviceLayout]:
        if self.system == "megatron_pp":
            return [DeviceLayout(num_devices=NUM_DEVICES, stage_blocks=_cut_of_script(depth))]
        if self.system in _POOLS:
            rounds = dict.fromkeys(max(1, depth // (NUM_DEVICES * size)) for size in _STAGE_SIZES)
            cuts = [even_cut(depth, NUM_DEVICES * number) for number in rounds]
            return [DeviceLayout(num_devices=NUM_DEVICES, stage_blocks=cut, schedule="breadth_first") for cut in cuts]
        return [DeviceLayout(num_devices=NUM_DEVICES, data="zero3" if self.system == "fsdp" else "zero2")]

    def plan(self, layout: DeviceLayout, *, depth: int, micro_batch: int, num_micro_batches: int, num_tokens: int) -> Plan:
        is_away = self.system in _ON_HOST
        choice: BlockChoice = "recompute"
        num_chunks = -(-micro_batch * num_tokens // _TOKENS_PER_CHUNK) if self.system == "roundpipe_sync" else 1
        return Plan(
            batch=BatchPlan(micro_batch_size=micro_batch, accumulation_steps=num_micro_batches),
            weights=WeightsPlan(dtype="fp16", place="host" if is_away else "device"),
            gradients=GradientsPlan(choice="host" if is_away else "keep"),
            optimizer_state=OptimizerStatePlan(place="host" if is_away else "device"),
            layout=layout,
            activations=ActivationsPlan(per_block=(choice,) * depth),
            logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks),
            allocator=AllocatorPlan(expandable_segments=True),
        )


def _cut_of_script(depth: int) -> tuple[int, ...]:
    """Even, or fewer blocks in the first and last stage (megatron/train.py)."""
    middle = -(-depth // NUM_DEVICES)
    left = depth - (NUM_DEVICES - 2) * middle
    return even_cut(depth, NUM_DEVICES) if left < 2 else (left // 2, *(middle,) * (NUM_DEVICES - 2), left - left // 2)


def read_pool_rows(file: Path = ROWS_FILE) -> list[PoolRow]:
    with file.open(newline="", encoding="utf-8") as stream:
        return [
            PoolRow(
                system=cells["system"],  # type: ignore[arg-type]
                model=cells["model"],
                micro_batch=int(cells["micro_batch"]),
                num_micro_batches=int(cells["num_micro_batches"]),
                num_at_once=int(cells["num_at_once"]),
                tokens_per_s=float(cells["tokens_per_s"]) if cells["tokens_per_s"] else None,
                longest_tokens=int(cells["longest_tokens"]) if cells["longest_tokens"] else None,
            )
            for cells in csv.DictReader(stream)
        ]


class Pool:
    """Prices rows on the machine."""

    def __init__(self, *, folder: Path | None = None) -> None:
        """folder: keeps traced models, as for ``obtain_profile``."""
        self._folder = folder
        self._machine, self._fours = pool_machine(), pool_machine(cards_per_switch=4)
        self._profile = cache(self._trace)

    def compare(self, row: PoolRow) -> Row:
        """Published and estimated: whether it fits, the throughput, the longest sequence."""
        try:
            fitting = self._fitting(row, row.micro_batch, row.num_at_once, SEQUENCE_LENGTH)
            tokens_per_s = max((self._tokens_per_s(row, layout, self._machine) for layout in fitting), default=None)
            of_fours = max((self._tokens_per_s(row, layout, self._fours) for layout in fitting), default=None)
            longest = self._longest(row) if row.longest_tokens is not None else None
        except HeadroomError as error:
            return {"pool": row.system, "model": row.model, "failed": error.message}
        return {
            "pool": row.system,
            "model": row.model,
            "published_fits": row.tokens_per_s is not None,
            "estimated_fits": bool(fitting),
            "published_tokens_per_s": row.tokens_per_s,
            "estimated_tokens_per_s": None if tokens_per_s is None else round(tokens_per_s, 1),
            "estimated_tokens_per_s_of_fours": None if of_fours is None else round(of_fours, 1),
            "published_longest": row.longest_tokens,
            "estimated_longest": longest,
        }

    def _fitting(self, row: PoolRow, micro_batch: int, num_micro_batches: int, num_tokens: int) -> list[DeviceLayout]:
        profile = self._profile(row.model, is_cut=row.is_cut)
        extra_bytes = 0
        if row.system not in _OWN_LOSS:
            extra_bytes = micro_batch * num_tokens * MODELS[row.model]["vocab_size"] * _EXTRA_BYTES_PER_LOGIT
        found = []
        for layout in row.layouts(profile.num_blocks):
            prediction = self._price(row, layout, micro_batch, num_micro_batches, num_tokens, self._machine, in_detail=True)
            assert prediction.memory is not None
            has_room = NUM_DEVICES * prediction.host_peak_bytes <= HOST_BYTES
            if has_room and prediction.memory.process.value + extra_bytes <= self._machine.device.total_bytes:
                found.append(layout)
        return found

    def _tokens_per_s(self, row: PoolRow, layout: DeviceLayout, machine: Machine) -> float:
        found = self._price(row, layout, row.micro_batch, row.num_micro_batches, SEQUENCE_LENGTH, machine, in_detail=False)
        return found.tokens_per_s

    def _longest(self, row: PoolRow) -> int:
        """By halving; what needs less memory fits."""
        number = row.num_at_once if row.system in _POOLS else NUM_DEVICES if row.is_cut else 1
        fits, too_long = 0, _LONGEST + 1
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._fitting(row, 1, number, middle * _STEP_OF_LENGTHS):
                fits = middle
            else:
                too_long = middle
        return fits * _STEP_OF_LENGTHS

    def _price(
        self,
        row: PoolRow,
        layout: DeviceLayout,
        micro_batch: int,
        num_micro_batches: int,
        num_tokens: int,
        machine: Machine,
        *,
        in_detail: bool,
    ) -> Prediction:
        profile = self._profile(row.model, is_cut=row.is_cut)
        plan = row.plan(
            layout,
            depth=profile.num_blocks,
            micro_batch=micro_batch,
            num_micro_batches=num_micro_batches,
            num_tokens=num_tokens,
        )
        workload = TrainingWorkload(
            sequence_length=num_tokens,
            global_batch_size=micro_batch * num_micro_batches * layout.num_parts,
            max_grad_norm=None,
            adapter=_adapter_of(row.model),
        )
        found = estimate_training(profile, plan=plan, workload=workload, machine=machine)
        return add_memory(found, profile, plan=plan, workload=workload, machine=machine) if in_detail else found

    def _trace(self, model: str, *, is_cut: bool) -> Profile:
        config = _CUT_MODELS.get(model, MODELS[model]) if is_cut else MODELS[model]
        extent = Extent(
            representations=("bf16",), choices=("keep", "recompute"), shapes=((1, 1024), (8, _LONGEST * _STEP_OF_LENGTHS))
        )
        with stock_layers():
            return obtain_profile(read_any_spec(config), adapter=_adapter_of(model), extent=extent, folder=self._folder)


def pool_machine(*, cards_per_switch: int | None = None) -> Machine:
    """Eight cards of the table, whose products add up in fp16. cards_per_switch: None for what the table assumes."""
    machine = table_machine(
        "RTX 4090", num_devices=NUM_DEVICES, host_memory_bytes=HOST_BYTES, cards_per_switch=cards_per_switch
    )
    rates = machine.rates
    products = {**rates.matmul_flops_per_s, "fp16": 2 * rates.matmul_flops_per_s["fp16"]}
    return replace(machine, rates=replace(rates, matmul_flops_per_s=products))


def _adapter_of(model: str) -> Adapter | None:
    return Adapter(rank=ADAPTER_RANK) if model.endswith("LoRA") else None


def compare_pools(*, folder: Path | None, every: int) -> Iterator[Row]:
    """One row for each system and model. every: take one of so many."""
    pool = Pool(folder=folder)
    by_model = sorted(read_pool_rows(), key=lambda row: [*MODELS].index(row.model))
    yield from map(pool.compare, by_model[::every])


def summarize_pools(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    found = [row for row in rows if "pool" in row and "failed" not in row]
    if not found:
        return {}
    right = [row for row in found if row["published_fits"] == row["estimated_fits"]]
    wrong = [f"{row['pool']}, {row['model']}" for row in found if row not in right]
    timed = [row for row in found if row["published_tokens_per_s"] and row["estimated_tokens_per_s"]]
    ranking = rank_correlation(
        [row["estimated_tokens_per_s"] for row in timed], [row["published_tokens_per_s"] for row in timed]
    )
    with_fours = rank_correlation(
        [row["estimated_tokens_per_s_of_fours"] for row in timed], [row["published_tokens_per_s"] for row in timed]
    )
    by_model: dict[str, list[Row]] = {}
    for row in timed:
        by_model.setdefault(row["model"], []).append(row)
    orders = {
        model: {"published": _order(members, "published"), "estimated": _order(members, "estimated")}
        for model, members in by_model.items()
    }
    ratios = [row["estimated_tokens_per_s"] / row["published_tokens_per_s"] for row in timed]
    lengths = [row for row in found if row["published_longest"]]
    errors = sorted(abs(row["estimated_longest"] / row["published_longest"] - 1) for row in lengths)
    median = statistics.median(errors) if errors else None
    return {
        "pools: share of cells whose fit is right": goal(
            round(len(right) / len(found), 3), ">= 0.95", met=len(right) >= 0.95 * len(found), needs="all cases"
        ),
        "pools: cells whose fit is wrong": goal(wrong, "none: reported", met=True),
        "pools: rank correlation of throughput": goal(
            ranking, ">= 0.9", met=ranking is not None and ranking >= 0.9, needs="all cases"
        ),
        "pools: rank correlation if four cards share a link to the host": goal(with_fours, "none: reported", met=True),
        "pools: estimated over published throughput": goal(
            {"median": round(statistics.median(ratios), 2), "least": round(min(ratios), 2), "most": round(max(ratios), 2)}
            if ratios
            else None,
            "none: reported",
            met=True,
        ),
        "pools: orders of systems by model, fastest first": goal(orders, "none: reported", met=True),
        "pools: median error of the longest sequence": goal(
            None if median is None else round(median, 3), "<= 0.15", met=median is not None and median <= 0.15, needs="all cases"
        ),
    }


def _order(rows: Sequence[Row], which: str) -> list[str]:
    return [row["pool"] for row in sorted(rows, key=lambda row: -row[f"{which}_tokens_per_s"])]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation; no two numbers are equal."""
    if len(first) < 2:
        return None
    one, other = _ranks(first), _ranks(second)
    squares = sum((one[index] - other[index]) ** 2 for index in range(len(one)))
    return round(1 - 6 * squares / (len(one) * (len(one) ** 2 - 1)), 3)


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    return [order.index(index) for index in range(len(values))]
