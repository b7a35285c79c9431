"""One model type from end to end: trained by plain transformers, then read, profiled, estimated and run here.

Runs in a child process (``command.py``). A type that plain transformers does not train is none that a user could bring. Of one
that it trains, each plan ends as estimated, refused (a sentence of the product's) or broken (anything else). What a plan
allocates is counted as in ``benchmarks.accuracy``: by torch's profiler, which shares nothing with the runtime's meter. The
loss is held against transformers' own on the same weights and tokens.
"""

import logging
import resource
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.meter import AllocationProfile
from benchmarks.accuracy.run import CPU, Bench, measure_memory
from benchmarks.accuracy.techniques import make_training_plan, merge_changes
from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.record import Row
from benchmarks.zoo.tiny import NUM_SPECIAL, VOCAB_SIZE, make_tiny_config
from optimizer.base.errors import HeadroomError
from optimizer.data.batches import IGNORED_LABEL
from optimizer.models.any_spec import read_any_spec
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.runtime.layers.matmul_dispatch import has_quicker_library
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

PLANS: dict[str, tuple[str, ...]] = {"plain": (), "recompute": ("recompute",), "lora": ("lora",)}
KEPT = (
    "error",
    "predicted_bytes",
    "predicted_unmetered_bytes",
    "profiled_bytes",
    "metered_bytes",
    "host_error_bytes",
    "predicted_moment",
    "measured_moment",
    "stage_error_bytes",
    "wrong_categories",
    "error_to_meter_bytes",
)
"""Those figures of ``benchmarks.accuracy`` that a row keeps."""
SEQUENCE_LENGTH = 64
BATCH_SIZE = 4
MEMORY_LIMIT_BYTES = 12 << 30
"""Address space of a child: a config that came out huge must not take the machine down."""


def measure_type(model_type: str, class_name: str) -> Row:
    """All of one type."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    started_s = time.monotonic()
    row: Row = {"what": "type", "model_type": model_type, "class": class_name}
    try:
        document = {**make_tiny_config(model_type), "architectures": [class_name]}
        row |= train_plainly(document)
    except Exception as error:
        return {**row, "outcome": "not trained by transformers", "why": _shown(error)}
    row |= _measure_here(document)
    return {**row, "seconds": round(time.monotonic() - started_s, 1)}


def train_plainly(document: dict[str, Any]) -> Row:
    """Two steps of transformers' own model with AdamW; bytes of the second. Raises whatever it raises."""
    with AllocationProfile() as profiled:
        model = _build_plainly(document)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = _make_ids()
        _step_plainly(model, optimizer, ids)
        with profiled.steady_step():
            _step_plainly(model, optimizer, ids)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"num_parameters": num_parameters, "transformers_bytes": profiled.peak.device_bytes}


def _build_plainly(document: dict[str, Any]) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {name: value for name, value in document.items() if name != "model_type"}
    config = CONFIG_MAPPING[document["model_type"]](**values)
    _keep_no_cache(config)
    torch.manual_seed(0)
    model_class = getattr(transformers, document["architectures"][0])
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    return model_class._from_config(config).train()


def _keep_no_cache(config: Any) -> None:
    config.use_cache = False
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            _keep_no_cache(getattr(config, name))


def _step_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _make_ids() -> torch.Tensor:
    """Ordinary tokens: ids of images and of padding change what a model does."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(NUM_SPECIAL, VOCAB_SIZE - NUM_SPECIAL, (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator)


def _measure_here(document: dict[str, Any]) -> Row:
    try:
        spec = read_any_spec(document)
    except Exception as error:
        return _ended(error)
    cases = {name: _make_case(name, spec, document) for name in PLANS}
    machine = replace(make_cpu_machine(), num_threads=torch.get_num_threads(), packs_fp32=has_quicker_library())
    bench = Bench(machine, list(cases.values())[:2])
    plans = {name: _measure_plan(bench, case) for name, case in cases.items()}
    plain = plans["plain"]
    row: Row = {name: plain[name] for name in ("outcome", "why") if name in plain}
    if plain["outcome"] == "estimated":
        row["loss"] = _attempt(lambda: _compare_losses(spec, document))
    return {**row, "plans": plans}


def _measure_plan(bench: Bench, case: Case) -> Row:
    def measure() -> Row:
        found = measure_memory(bench, case)
        return {"outcome": "estimated", **{name: found[name] for name in KEPT}}

    return _attempt(measure)


def _attempt(measure: Callable[[], Row]) -> Row:
    try:
        found = measure()
    except Exception as error:
        return _ended(error)
    return found


def _ended(error: Exception) -> Row:
    return {"outcome": "refused" if isinstance(error, HeadroomError) else "broken", "why": _shown(error)}


def _shown(error: Exception) -> str:
    text = str(error) if isinstance(error, HeadroomError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


class _ZooCase(Case):
    """A case whose config is of any model type."""

    @property
    def spec(self) -> ModelSpec:
        return read_any_spec(dict(self.config))


def _make_case(name: str, spec: ModelSpec, document: dict[str, Any]) -> Case:
    changes = merge_changes(PLANS[name])
    workload = TrainingWorkload(
        sequence_length=SEQUENCE_LENGTH,
        global_batch_size=BATCH_SIZE,
        learning_rate=1e-4,
        eval_batches=1,
        **changes.get("work", {}),
    )
    return _ZooCase(
        name=f"{spec.model_type}/zoo/{name}",
        model=spec.model_type,
        shape="zoo",
        techniques=PLANS[name],
        config=document,
        workload=workload,
        plan=make_training_plan(spec.num_blocks, workload, changes),
    )


def _compare_losses(spec: ModelSpec, document: dict[str, Any]) -> Row:
    """The loss of an evaluation here and in transformers, both with the weights that were drawn here."""
    case = _make_case("plain", spec, document)
    assert isinstance(case.plan, Plan)
    assert isinstance(case.workload, TrainingWorkload)
    ids = _make_ids()
    model = build_model(spec)
    theirs = _build_plainly(document).eval()
    theirs.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = float(theirs(input_ids=ids, labels=ids).loss)
    shifted = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], IGNORED_LABEL)), dim=1)
    trainer = Trainer(model, plan=case.plan, workload=case.workload, device=CPU, meter=None)
    try:
        # Some older classes compare each position with itself, not with the next.
        found = [float(trainer.evaluate([(ids, labels)])) for labels in (shifted, ids)]
    finally:
        trainer.close(keep_weights=False)
    return {"here": min(found, key=lambda loss: abs(loss - expected)), "transformers": expected}
