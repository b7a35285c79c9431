"""Bars, rows and words from documents."""

from typing import get_args

import pytest

from optimizer.base.categories import CATEGORIES
from optimizer.base.units import MIB
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import TECHNIQUE_GROUPS, TECHNIQUE_LABELS, Technique
from optimizer.plan.weights import WeightsPlan
from tests.webapp.pages import rows
from webapp.pages.forms.generation import FORBIDDEN
from webapp.pages.forms.training import JobForm
from webapp.pages.presentation import BLOCK_CHOICES, comparisons, plan_rows, signed_error, stacked_bar, step_words
from webapp.pages.shown.offer_rows import block_letters


def test_a_bar_stacks_the_categories_in_their_fixed_order() -> None:
    bar = stacked_bar(dict(reversed(rows.PEAK.items())), budget_bytes=None)
    assert [segment.category for segment in bar.segments] == [name for name in CATEGORIES if name in rows.PEAK]


def test_the_segments_of_a_bar_meet_without_gaps() -> None:
    bar = stacked_bar(rows.PEAK, budget_bytes=480 * MIB)
    ends = [float(part.start_percent[:-1]) + float(part.width_percent[:-1]) for part in bar.segments]
    starts = [float(part.start_percent[:-1]) for part in bar.segments]
    assert starts[0] == 0
    assert starts[1:] == pytest.approx(ends[:-1], abs=0.002)  # three decimals are written
    assert ends[-1] == pytest.approx(409 / (480 * 1.04) * 100, abs=0.01)


def test_a_bar_over_its_budget_keeps_the_budget_line_inside() -> None:
    bar = stacked_bar({"weights": 200}, budget_bytes=100)
    assert bar.budget_percent == "48.077%"


def test_an_empty_bar_is_a_sentence_too() -> None:
    assert stacked_bar({}, budget_bytes=None).summary == "0 B: nothing yet"


def test_the_plan_table_leaves_out_what_the_job_does_not_have() -> None:
    table = plan_rows(rows.make_plan().to_json(), prediction=rows.make_prediction().to_json(), measured=None)
    assert [row.category for row in table] == [name for name in CATEGORIES if name != "kv_cache"]
    assert table[-1].lifetime == "counted, not decided"


def test_runs_of_blocks_are_shortened() -> None:
    assert block_letters(rows.BLOCKS) == "R6 O4 K2"


@pytest.mark.parametrize(
    ("predicted", "measured", "words"), [(99.3, 100, "−0.7 %"), (110, 100, "+10.0 %"), (1, None, ""), (1, 0, "")]
)
def test_an_error_is_relative_to_the_measurement(predicted: float, measured: int | None, words: str) -> None:
    assert signed_error(predicted, measured=measured) == words


def test_a_comparison_waits_for_its_measurement() -> None:
    first, _ = comparisons(rows.make_prediction().to_json(), measured=None)
    assert (first.predicted, first.measured, first.error) == ("409 MiB", "not yet", "")


def test_every_decision_of_a_plan_has_its_words() -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        weights=WeightsPlan(autocast="bf16"),
        gradients=GradientsPlan(choice="host"),
        optimizer_state=OptimizerStatePlan(place="host", fraction=0.75),
        activations=ActivationsPlan(per_block=("offload_disk", "offload", "offload", "selective"), compress="int8"),
        logits_and_loss=LogitsAndLossPlan(num_chunks=8),
    )
    shown = {row.category: row for row in plan_rows(plan.to_json(), prediction=None, measured=None)}
    assert (shown["weights"].place, shown["weights"].representation) == ("device", "fp32, products in bf16")
    assert (shown["gradients"].lifetime, shown["gradients"].place) == ("moved as they appear", "host")
    assert shown["optimizer_state"].place == "host 75 %, device 25 %"
    assert shown["activations"].lifetime == "1 recomputed in part, 2 offloaded, 1 offloaded to disk blocks"
    assert shown["activations"].place == "host for 2 of 4 blocks, disk for 1 of 4 blocks"
    assert shown["activations"].representation == "fp32, int8 on the way"
    assert shown["logits_and_loss"].lifetime == "in 8 chunks"


def test_streamed_weights_are_said_to_be_fetched() -> None:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
        weights=WeightsPlan(place="disk", frozen="nf4"),
        activations=ActivationsPlan(per_block=("keep",)),
    )
    row = next(row for row in plan_rows(plan.to_json(), prediction=None, measured=None) if row.category == "weights")
    assert row.lifetime == "each block's fetched for its forward and backward"
    assert (row.place, row.representation) == ("disk", "fp32, frozen ones nf4")


def test_each_choice_of_a_block_has_a_letter_of_its_own() -> None:
    assert set(BLOCK_CHOICES) == set(get_args(BlockChoice))
    assert len({letter for letter, _ in BLOCK_CHOICES.values()}) == len(BLOCK_CHOICES)


def test_whatever_a_generations_plan_may_use_can_be_forbidden_in_its_form() -> None:
    caches = (
        KvCachePlan(dtype="int8", place="disk"),
        KvCachePlan(place="remote", prefix_tokens=8),
        KvCachePlan(place="host", attention="host"),
    )
    plans = [
        GenerationPlan(weights=WeightsPlan(dtype=dtype, frozen="int8", place="host"), kv_cache=cache)
        for dtype in ("bf16", "fp16")
        for cache in caches
    ]
    assert {technique for plan in plans for technique in plan.techniques} == set(FORBIDDEN)


def test_each_technique_has_a_label_and_one_place_in_the_form() -> None:
    grouped = [name for _, names in TECHNIQUE_GROUPS for name in names]
    assert grouped == list(TECHNIQUE_LABELS)
    assert set(grouped) == set(get_args(Technique))
    assert len(set(TECHNIQUE_LABELS.values())) == len(TECHNIQUE_LABELS)
    form = JobForm(models=[], datasets=[])
    boxes = {box.data["value"]: box.choice_label for _, boxes in form.technique_groups() for box in boxes}
    of_generations, of_devices = (dict(TECHNIQUE_GROUPS)[name] for name in ("Keys and values of generations", "Several devices"))
    left_out = (*of_generations, *of_devices)
    assert boxes == {name: label for name, label in TECHNIQUE_LABELS.items() if name not in left_out}
    assert set(of_generations) < set(FORBIDDEN)


@pytest.mark.parametrize(
    ("step_ms", "words"),
    [(0.543, "0.543 ms"), (4.0, "4 ms"), (412.3, "412 ms"), (1840.0, "1.84 s"), (90_000.0, "2 min")],
)
def test_a_time_is_written_as_people_read_it(step_ms: float, words: str) -> None:
    assert step_words(step_ms) == words


def test_what_a_job_that_has_ended_did_not_measure_is_not_waited_for() -> None:
    prediction = rows.make_prediction().to_json()
    running, ended = (comparisons(prediction, measured=None, has_ended=has_ended) for has_ended in (False, True))
    assert {line.measured for line in running} == {"not yet"}
    assert {line.measured for line in ended} == {"not measured"}
