"""Nothing fits here: what would fit if something else were asked for. Every way out has been priced.

Of each kind the nearest: choices that round, the largest batch that is smaller, adapters instead of every weight, the longest
sequence that is shorter; ``more_hardware.py`` has those that need something more. A way out names a plan that fits, which need
not be the fastest: a search there finds that.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from optimizer.base.errors import InvalidInput, InvalidPlan, InvalidWorkload, NoFeasiblePlan
from optimizer.base.units import MIB, format_bytes
from optimizer.goal import Goal
from optimizer.hardware.machine import Machine
from optimizer.hardware.rental import PriceList
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import TECHNIQUE_LABELS
from optimizer.plan.weights import FrozenFormat
from optimizer.search.answer.smallest import allocated_bytes, find_smallest_allocated
from optimizer.search.problem import PricedPlan, divisors
from optimizer.search.questions.more_hardware import list_hardware_ways
from optimizer.search.questions.ways import Asker, Expense, Kind, Obtain, Pose, WayOut, rank_ways, way_out
from optimizer.workload import Adapter, TrainingWorkload

SEQUENCE_STEP = 128
MAX_TRIED = 4
"""Sequences and batches, of those that bounds leave, for which a plan is looked for."""
ADAPTER = Adapter(rank=16)
"""Alternatives looked at where every weight is trained."""
_LORA: Final = (
    f"adapters of rank {ADAPTER.rank} beside frozen weights (LoRA)",
    {"workload": {"adapter": {"rank": ADAPTER.rank}}},
    f"--lora {ADAPTER.rank}",
)
"""Words, change and flags."""
_PACKED: Final[tuple[FrozenFormat, ...]] = ("nf4", "int4")
"""Formats of frozen weights, the one preferred first; nf4 needs bitsandbytes."""
_ROUNDED: Final[tuple[tuple[Kind, str, dict[str, Any]], ...]] = (
    ("8bit_optimizer", "8-bit optimizer state", {"optimizer_state.bits": 8}),
    ("bf16", "bf16 weights", {"weights.dtype": "bf16"}),
    ("bf16_8bit", "bf16 weights and 8-bit optimizer state", {"optimizer_state.bits": 8, "weights.dtype": "bf16"}),
)
_PLAIN: Final[dict[str, Any]] = {
    "weights.dtype": "fp32",
    "weights.master": "fp32",
    "weights.autocast": "off",
    "weights.frozen": "same",
    "optimizer_state.bits": 32,
}


def add_ways_out(
    error: NoFeasiblePlan,
    pose: Pose,
    *,
    obtain: Obtain,
    workload: TrainingWorkload,
    goal: Goal,
    machine: Machine,
    prices: PriceList,
) -> NoFeasiblePlan:
    """The same error with ``fields["ways_out"]``, what costs least first, and ``fields["largest_part"]``; its hint names them.

    prices: to say which card is cheapest.
    """

    def obtained(workload: TrainingWorkload, goal: Goal) -> Any:
        try:
            return obtain(workload, goal)
        except InvalidInput:
            return None  # a model that adapters cannot be put beside has one way out less

    asker = Asker(
        pose=lambda *asked: replace(pose(*asked), names_ways=False),
        obtain=obtained,
        workload=workload,
        goal=goal,
        machine=machine,
        representation=_representation(goal.pins, Plan.from_json(error.fields["smallest_plan"])),
    )
    ways = [*_permitted(asker), *_rounded(asker), *_smaller_batch(asker), *_adapters(asker), *_shorter(asker)]
    if not ways:
        ways.extend(_shorter_with_adapters(asker))
    if not ways:
        ways.extend(_with_larger_budget(asker, error))
    ways = rank_ways([*ways, *list_hardware_ways(asker, prices, error=error)])
    error.fields["largest_part"] = largest_part(error.fields["bytes_by_category"])
    error.fields["ways_out"] = [way.to_json() for way in ways]
    if ways:
        error.hint = f"What would fit: {'; '.join(way.sentence for way in ways)}."
    return error


def largest_part(bytes_by_category: dict[str, int]) -> str:
    """The category that holds most at the smallest peak."""
    return max(bytes_by_category, key=lambda name: bytes_by_category[name])


def _representation(pins: Pins, plan: Plan) -> Pins:
    weights = plan.weights
    return _pinned(
        pins,
        {
            "weights.dtype": weights.dtype,
            "weights.master": weights.master,
            "weights.autocast": weights.autocast,
            "weights.frozen": weights.frozen,
            "optimizer_state.bits": plan.optimizer_state.bits,
        },
    )


def _pinned(pins: Pins, values: dict[str, Any]) -> Pins:
    """The pins with more; what is pinned already stays."""
    given = dict(pins.values())
    by_category: dict[str, dict[str, Any]] = {"weights": {}, "optimizer_state": {}}
    for path, value in values.items():
        category, _, knob = path.partition(".")
        if path not in given:
            by_category[category][knob] = value
    return replace(
        pins,
        weights=replace(pins.weights, **by_category["weights"]),
        optimizer_state=replace(pins.optimizer_state, **by_category["optimizer_state"]),
    )


# The numbers stay.


def _permitted(asker: Asker) -> Iterator[WayOut]:
    """Each technique that is forbidden and helps by itself; where none does, all of them together."""
    goal = asker.goal
    forbidden = [technique for technique in goal.forbid if goal.allows_loss_by(technique)]
    tried = [((technique,), f"permit '{TECHNIQUE_LABELS[technique]}'") for technique in forbidden]
    found_any = False
    for freed, words in [*tried, *([(tuple(forbidden), "permit what is forbidden")] if len(forbidden) > 1 else [])]:
        if found_any and len(freed) > 1:
            return
        others = tuple(technique for technique in goal.forbid if technique not in freed)
        found = asker.ask(goal=replace(goal, forbid=others, pins=asker.representation))
        if found is not None:
            found_any = True
            change = {"goal": {"forbid": list(others)}}
            yield way_out("permit", words, found, change, flags=f"no --forbid {' '.join(freed)}", expense="nothing")


# Numbers are rounded.


def _rounded(asker: Asker) -> Iterator[WayOut]:
    """Formats that round as training in 16 bits does, those that are not allowed yet; the last only where no other helps."""
    goal = asker.goal
    found_any = False
    if not goal.allow_lossy:
        for kind, words, values in _ROUNDED:
            found = None if found_any and kind == "bf16_8bit" else asker.ask(goal=_rounding(goal, values))
            if found is not None:
                found_any = True
                pins = " ".join(f"--pin {path}={value}" for path, value in values.items())
                flags = f"--allow-lossy rounding {pins}"
                yield way_out(kind, words, found, _goal_change("rounding", values), flags=flags, expense="rounding")
    if goal.allow_lossy and goal.most_loss == "any":
        return
    if not found_any:
        found = asker.ask(goal=replace(goal, allow_lossy=True, most_loss="any"))
        if found is not None and not found.plan.is_lossless:
            words = f"choices that change the numbers ({', '.join(_lossy_words(found.plan))})"
            change = {"goal": {"allow_lossy": True, "most_loss": "any"}}
            yield way_out("lossy", words, found, change, flags="--allow-lossy", expense="training")


def _rounding(goal: Goal, values: dict[str, Any]) -> Goal:
    return replace(goal, allow_lossy=True, most_loss="rounding", pins=_pinned(goal.pins, {**_PLAIN, **values}))


def _goal_change(most_loss: str, values: dict[str, Any]) -> dict[str, Any]:
    pins: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        category, _, knob = path.partition(".")
        pins.setdefault(category, {})[knob] = value
    return {"goal": {"allow_lossy": True, "most_loss": most_loss, "pins": pins}}


def _lossy_words(plan: Plan) -> Iterator[str]:
    weights = plan.weights
    if weights.autocast != "off":
        yield f"autocast to {weights.autocast}"
    if weights.dtype != "fp32":
        yield f"{weights.dtype} weights"
    if weights.master != "fp32":
        yield "no fp32 masters"
    if weights.frozen != "same":
        yield f"frozen weights in {weights.frozen}"
    if plan.optimizer_state.bits != 32:
        yield f"state in {plan.optimizer_state.bits} bits"
    if plan.activations.compress != "none":
        yield f"copies in {plan.activations.compress}"


# Something else is trained.


def _adapters(asker: Asker) -> Iterator[WayOut]:
    """Low-rank adapters beside frozen weights as they are, and beside packed ones."""
    if asker.workload.adapter is None:
        found = asker.ask(adapter=ADAPTER, goal=asker.goal)
        if found is not None and found.plan.weights.frozen == "same":
            yield _adapter_way(found)
    found = _ask_packed(asker)
    if found is not None:
        yield _packed_way("qlora", asker, found)


def _adapter_way(found: PricedPlan) -> WayOut:
    words, change, flags = _LORA
    return way_out("adapters", words, found, change, flags=flags, expense="training")


def _ask_packed(asker: Asker, **work: Any) -> PricedPlan | None:
    """Adapters beside packed frozen weights; None where that is allowed already, or pinned otherwise."""
    goal, adapter = asker.goal, asker.workload.adapter
    pinned = dict(goal.pins.values())
    if (adapter is not None and goal.allow_lossy and goal.most_loss == "any") or "weights.frozen" in pinned:
        return None
    for form in _PACKED:
        values = {"weights.dtype": "bf16", "weights.autocast": "off", "weights.frozen": form, "optimizer_state.bits": 32}
        try:
            packed = replace(goal, allow_lossy=True, most_loss="any", pins=_pinned(goal.pins, values))
        except InvalidWorkload:
            return None
        found = asker.ask(goal=packed, adapter=adapter or ADAPTER, **work)
        if found is not None:
            return found
    return None


def _packed_way(kind: Kind, asker: Asker, found: PricedPlan, *, sequence_length: int | None = None) -> WayOut:
    """sequence_length: where it is another than was asked for."""
    rank, form = (asker.workload.adapter or ADAPTER).rank, found.plan.weights.frozen
    values = {"weights.dtype": "bf16", "weights.frozen": form}
    change = _goal_change("any", values)
    flags = f"--allow-lossy --pin weights.dtype=bf16 --pin weights.frozen={form}"
    words = f"adapters of rank {rank} beside weights in {form} (QLoRA)"
    work: dict[str, Any] = {}
    if asker.workload.adapter is None:
        work, flags = {"adapter": {"rank": rank}}, f"--lora {rank} {flags}"
    if sequence_length is not None:
        words, flags = f"{words} and sequences of {sequence_length:,} tokens", f"{flags} --sequence-length {sequence_length}"
        work["sequence_length"] = sequence_length
    if work:
        change["workload"] = work
    return way_out(kind, words, found, change, flags=flags, expense="training" if sequence_length is None else "data")


def _smaller_batch(asker: Asker) -> Iterator[WayOut]:
    sizes = list(reversed(divisors(asker.workload.global_batch_size)[:-1]))
    found = _largest_that_fits(
        sizes, lambda size: asker.may(global_batch_size=size), lambda size: asker.ask(global_batch_size=size)
    )
    if found is not None:
        size, priced = found
        change = {"workload": {"global_batch_size": size}}
        yield way_out("smaller_batch", f"a batch of {size}", priced, change, flags=f"--batch {size}", expense="training")


# Less text at once.


def _shorter(asker: Asker) -> Iterator[WayOut]:
    found = _shorter_that_fits(
        asker, lambda length: asker.may(sequence_length=length), lambda length: asker.ask(sequence_length=length)
    )
    if found is not None:
        length, priced = found
        change = {"workload": {"sequence_length": length}}
        flags = f"--sequence-length {length}"
        yield way_out("shorter_sequence", f"sequences of {length:,} tokens", priced, change, flags=flags, expense="data")


def _shorter_with_adapters(asker: Asker) -> Iterator[WayOut]:
    """Both at once, where neither helps by itself."""
    found = _shorter_that_fits(
        asker, lambda length: True, lambda length: _ask_packed(asker, sequence_length=length)
    )
    if found is not None:
        yield _packed_way("qlora_shorter", asker, found[1], sequence_length=found[0])


# The budget is far too small: a larger one, and less of it.


def _with_larger_budget(asker: Asker, error: NoFeasiblePlan) -> Iterator[WayOut]:
    """Less work beside the least budget that it needs, if that is a tenth less than all of the work needs and the device has it.

    For budgets so small that none of these helps by itself.
    """
    goal, asked = asker.goal, asker.workload.sequence_length
    most_bytes = int(error.fields["smallest_feasible_bytes"]) * 9 // 10
    if not goal.allow_lossy:
        kind, words, values = _ROUNDED[-1]
        flags = f"--allow-lossy rounding {' '.join(f'--pin {path}={value}' for path, value in values.items())}"
        if (least := _least_budget(asker, _rounding(goal, values), most_bytes)) is not None:
            yield _beside_budget(kind, words, least, _goal_change("rounding", values), flags=flags, expense="rounding")
    if asker.workload.adapter is None and (least := _least_budget(asker, goal, most_bytes, adapter=ADAPTER)) is not None:
        words, lora, flags = _LORA
        yield _beside_budget("adapters", words, least, lora, flags=flags, expense="training")
    whole = asker.obtain(asker.workload, goal)
    step = max(SEQUENCE_STEP, 1 if whole is None else whole.sequence_multiple)
    length = asked // 2 // step * step
    if length and (least := _least_budget(asker, goal, most_bytes, sequence_length=length)) is not None:
        words, flags = f"sequences of {length:,} tokens", f"--sequence-length {length}"
        shorter = {"workload": {"sequence_length": length}}
        yield _beside_budget("shorter_sequence", words, least, shorter, flags=flags, expense="data")


def _least_budget(asker: Asker, goal: Goal, most_bytes: int, **work: Any) -> tuple[int, PricedPlan] | None:
    """The least budget in whole MiB with which something fits, and a plan that does; None where it is above ``most_bytes``."""
    device_bytes = asker.machine.device.memory_bytes
    problem = asker.problem(goal=replace(goal, device_budget_bytes=device_bytes), **work)
    if problem is None:
        return None
    try:
        smallest, prediction = find_smallest_allocated(problem)
    except InvalidPlan:
        return None  # host and disk have no room for any
    enough_bytes = -(-allocated_bytes(problem, smallest, prediction) // MIB) * MIB
    if enough_bytes > min(most_bytes, device_bytes):
        return None
    found = asker.ask(goal=replace(goal, device_budget_bytes=enough_bytes), **work)
    return enough_bytes, found or problem.priced("way out", smallest, prediction)


def _beside_budget(
    kind: Kind, words: str, least: tuple[int, PricedPlan], change: dict[str, Any], *, flags: str, expense: Expense
) -> WayOut:
    size = format_bytes(least[0])
    goal = {**change.get("goal", {}), "device_budget_bytes": least[0]}
    words, flags = f"{words} and a budget of {size}", f'{flags} --budget "{size}"'
    return way_out(kind, words, least[1], {**change, "goal": goal}, flags=flags, expense=expense)


def _shorter_that_fits(
    asker: Asker, may: Callable[[int], bool], ask: Callable[[int], PricedPlan | None]
) -> tuple[int, PricedPlan] | None:
    whole = asker.obtain(asker.workload, asker.goal)
    step = max(SEQUENCE_STEP, 1 if whole is None else whole.sequence_multiple)
    asked = asker.workload.sequence_length
    return _largest_that_fits(range((asked - 1) // step * step, 0, -step), may, ask)


def _largest_that_fits(
    sizes: Sequence[int], may: Callable[[int], bool], ask: Callable[[int], PricedPlan | None]
) -> tuple[int, PricedPlan] | None:
    """The largest size for which a plan is found, nearly. sizes: falling; of two the smaller holds less.

    may: cheap, and false only where nothing fits. Halving finds the largest size that bounds leave; a few are asked for from
    there on.
    """
    if not sizes or not may(sizes[-1]):
        return None
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if may(sizes[middle]) else (middle + 1, high)
    fitting: tuple[int, PricedPlan] | None = None
    refused, at = low - 1, low
    for _ in range(MAX_TRIED):
        found = ask(sizes[at])
        if found is None:
            refused = at
        else:
            fitting, high = (sizes[at], found), at
        # until something fits, down to a quarter; then between what fits and what does not
        at = (at + 3 * len(sizes)) // 4 if fitting is None else (refused + high) // 2
        if not refused < at < (len(sizes) if fitting is None else high):
            break
    return fitting
