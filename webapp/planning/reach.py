"""Finds what a model needs: on which cards of the table it can be trained or run, and whether that takes saving memory.

For each method two numbers decide, whatever the card: the peak of doing it plainly, and the smallest peak that any plan has. Both
come of the estimator, for one sequence at a time; a card's verdict is what it holds against them. Kept in this process by the
profile's hash, since a search takes some tenths of a second.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from optimizer.base.errors import HeadroomError, NoFeasiblePlan
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.estimate.prediction import Prediction
from optimizer.goal import GenerationGoal, Goal
from optimizer.hardware.devices import known_devices, table_machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.weights import FrozenFormat, WeightsPins, WeightsPlan
from optimizer.search.answer.smallest import find_smallest
from optimizer.search.generation.one_device import generation_problem
from optimizer.search.generation.smallest import find_smallest as find_smallest_generation
from optimizer.search.training import training_problem
from optimizer.workload import Adapter, GenerationWorkload, TrainingWorkload
from webapp.catalog.models import Model, Profile
from webapp.planning.search.profile_requests import request_profile
from webapp.planning.search.profiles import ProfileNeed, read_generation_profile, read_profile

MethodName = Literal["full", "lora", "qlora", "generate"]
CardVerdict = Literal["fits", "fits_saving", "does_not_fit"]
MAX_TRAINED_LENGTH = 1024
"""Length of the one sequence; less where the model has fewer positions."""
_PROMPT_LENGTH, _NEW_TOKENS = 512, 128
_PRICED_ON = "RTX 4090"
"""A card gives the estimator kernels to price; bytes of tensors are the same on every card."""
_NO_BUDGET_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way of using a model."""

    name: MethodName
    title: str
    what: str
    adapter: Adapter | None = None
    frozen: FrozenFormat = "same"

    @property
    def generates(self) -> bool:
        return self.name == "generate"


METHODS = (
    Method(name="full", title="Full fine-tuning", what="every weight is trained, AdamW in 32 bits"),
    Method(name="lora", title="LoRA", what="adapters of rank 8 beside frozen weights", adapter=Adapter()),
    Method(
        name="qlora",
        title="QLoRA",
        what="the same with frozen weights in 4 bits (nf4)",
        adapter=Adapter(),
        frozen="nf4",
    ),
    Method(name="generate", title="Generating", what=f"one prompt of {_PROMPT_LENGTH} tokens, {_NEW_TOKENS} more"),
)


@dataclass(frozen=True, kw_only=True)
class Need:
    """Device bytes of one method."""

    method: Method
    state: Literal["ready", "pending", "not_asked", "failed"]
    plain_bytes: int | None = None
    """No memory saved: everything stays on the device."""
    least_bytes: int | None = None
    """Bytes of the plan with the smallest peak."""
    message: str = ""
    """Why there is no answer."""

    def verdict_of(self, memory_bytes: int) -> CardVerdict | None:
        """Verdict on a card with so many bytes for one job; None while it is not known."""
        if self.plain_bytes is None or self.least_bytes is None:
            return None
        if self.plain_bytes <= memory_bytes:
            return "fits"
        return "fits_saving" if self.least_bytes <= memory_bytes else "does_not_fit"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card of the table with its verdict for each method, in the methods' order."""

    name: str
    memory_bytes: int
    verdicts: tuple[CardVerdict | None, ...]


def read_needs(model: Model) -> list[Need]:
    """Read what is known now; asks for nothing."""
    return [_read_need(model, method) for method in METHODS]


def ask_for_needs(model: Model) -> None:
    """Profiles that are missing become jobs."""
    for adapter, generates in ((None, False), (Adapter(), False), (None, True)):
        request_profile(ProfileNeed(model=model, adapter=adapter, generates=generates))


def read_cards(needs: Sequence[Need]) -> list[Card]:
    """The whole table, smallest card first."""
    return [
        Card(
            name=name,
            memory_bytes=memory_bytes,
            verdicts=tuple(need.verdict_of(memory_bytes) for need in needs),
        )
        for name, memory_bytes in _card_sizes()
    ]


def reach_document(model: Model) -> dict[str, Any]:
    """The answer of ``GET /models/{id}/cards``."""
    needs = read_needs(model)
    return {
        "sequence_length": _sequence_length(model),
        "methods": [
            {
                "name": need.method.name,
                "title": need.method.title,
                "what": need.method.what,
                "state": need.state,
                "plain_bytes": need.plain_bytes,
                "least_bytes": need.least_bytes,
                "message": need.message,
            }
            for need in needs
        ],
        "cards": [
            {
                "name": card.name,
                "memory_bytes": card.memory_bytes,
                "verdicts": dict(zip((need.method.name for need in needs), card.verdicts, strict=True)),
            }
            for card in read_cards(needs)
        ],
    }


def _read_need(model: Model, method: Method) -> Need:
    needed = ProfileNeed(model=model, adapter=method.adapter, generates=method.generates)
    row = Profile.objects.defer("document").filter(pk=needed.fingerprint).first()
    if row is None or (row.document_sha256 and row.version != needed.version):
        return Need(method=method, state="not_asked")
    if not row.document_sha256:
        message = str((row.error or {}).get("message", ""))
        return Need(method=method, state="failed" if row.error else "pending", message=message)
    try:
        plain_bytes, least_bytes = _bytes_of(method.name, row.pk, row.document_sha256, _sequence_length(model))
    except HeadroomError as error:
        return Need(method=method, state="failed", message=error.message)
    return Need(method=method, state="ready", plain_bytes=plain_bytes, least_bytes=least_bytes)


@functools.lru_cache(maxsize=256)
def _bytes_of(name: MethodName, fingerprint: str, document_sha256: str, sequence_length: int) -> tuple[int, int]:
    """Plain and smallest peak, with what the allocator takes beside the tensors."""
    method = next(method for method in METHODS if method.name == name)
    if method.generates:
        return _generation_bytes(fingerprint, document_sha256)
    profile = read_profile(fingerprint, document_sha256)
    problem = training_problem(
        profile,
        workload=TrainingWorkload(
            mode="finetune", sequence_length=sequence_length, global_batch_size=1, adapter=method.adapter
        ),
        goal=Goal(
            device_budget_bytes=_NO_BUDGET_BYTES,
            allow_lossy=method.frozen != "same",
            pins=Pins(weights=WeightsPins(frozen=method.frozen)),
        ),
        machine=table_machine(_PRICED_ON),
    )
    keep: BlockChoice = "keep"
    plain = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        activations=ActivationsPlan(per_block=(keep,) * problem.num_blocks),
        weights=WeightsPlan(frozen=method.frozen),
    )
    plain_bytes = _whole_peak(problem.priced("plain", plan=plain, prediction=problem.price(plain)).prediction)
    try:
        plan, prediction = find_smallest(problem)
    except NoFeasiblePlan:  # the host has no room for what would leave the device
        return plain_bytes, plain_bytes
    return plain_bytes, _whole_peak(problem.priced("smallest", plan, prediction).prediction)


def _generation_bytes(fingerprint: str, document_sha256: str) -> tuple[int, int]:
    problem = generation_problem(
        read_generation_profile(fingerprint, document_sha256),
        workload=GenerationWorkload(prompt_length=_PROMPT_LENGTH, num_new_tokens=_NEW_TOKENS),
        goal=GenerationGoal(device_budget_bytes=_NO_BUDGET_BYTES),
        machine=table_machine(_PRICED_ON),
    )
    plans = GenerationPlan(), find_smallest_generation(problem)
    plain, smallest = (problem.priced("", plan).prediction for plan in plans)
    return _whole_peak(plain), _whole_peak(smallest)


def _whole_peak(prediction: Prediction | GenerationPrediction) -> int:
    allocated = 0 if prediction.memory is None else prediction.memory.allocated.high
    return max(prediction.device_peak_high_bytes, allocated)


def _sequence_length(model: Model) -> int:
    return min(MAX_TRAINED_LENGTH, read_model_spec(model.config).max_sequence_length)


@functools.cache
def _card_sizes() -> list[tuple[str, int]]:
    sizes = {name: table_machine(name).device.memory_bytes for name in known_devices()}
    return sorted(sizes.items(), key=lambda item: (item[1], item[0]))
