"""Places of a plan's tensors, block by block."""

from dataclasses import replace
from typing import Any

from optimizer.plan.generation import GenerationPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from tests.webapp.pages import rows
from webapp.pages.shown.places import places_of


def rows_of(plan: Plan | GenerationPlan, *, num_blocks: int = 12) -> dict[str, Any]:
    return {row.label: row for row in places_of(plan.to_json(), num_blocks=num_blocks).rows}


def letters(row: Any) -> str:
    return "".join(cell.letter for cell in row.cells)


def test_each_block_has_the_letter_of_what_becomes_of_its_activations() -> None:
    found = rows_of(rows.make_plan())
    assert letters(found["activations"]) == "RRRRRROOOOKK"
    assert found["activations"].cells[0].number == 1
    assert (found["weights"].words, found["weights"].cells) == ("fp32, device", ())


def test_weights_that_stream_have_their_letters_too() -> None:
    plan = replace(rows.make_plan(), weights=WeightsPlan(place="host", prefetch=2, dtype="bf16"))
    found = rows_of(plan)["weights"]
    assert (letters(found), found.words) == ("O" * 12, "bf16, host, fetched 2 ahead")


def test_state_that_is_divided_has_its_shares() -> None:
    plan = replace(
        rows.make_plan(),
        optimizer_state=OptimizerStatePlan(place="host", fraction=0.6),
        gradients=GradientsPlan(choice="host"),
    )
    found = rows_of(plan)["optimizer state"]
    assert found.words == "32 bits, host 60 %, device 40 %"
    assert [(share.place, share.percent) for share in found.shares] == [("host", 60), ("device", 40)]


def test_a_generation_has_weights_and_cache_block_by_block() -> None:
    plan = GenerationPlan(weights=WeightsPlan(place="host"), kv_cache=KvCachePlan(dtype="int8"))
    found = rows_of(plan, num_blocks=3)
    assert (letters(found["weights"]), letters(found["KV cache"])) == ("OOO", "KKK")
    assert found["KV cache"].words == "int8, device"


def test_a_cache_that_is_attended_to_on_the_host_is_not_fetched() -> None:
    plan = GenerationPlan(kv_cache=KvCachePlan(place="host", attention="host"))
    found = rows_of(plan, num_blocks=3)["KV cache"]
    assert (letters(found), found.words) == ("OOO", "fp32, host, attention there")


def test_a_cache_in_the_remote_store_has_its_letter() -> None:
    found = rows_of(GenerationPlan(kv_cache=KvCachePlan(dtype="int4", place="remote")), num_blocks=3)
    assert (found["KV cache"].words, letters(found["KV cache"])) == ("int4, remote store, fetched 1 ahead", "NNN")


def test_only_letters_in_use_are_explained() -> None:
    assert [letter for letter, _ in places_of(rows.make_plan().to_json(), num_blocks=12).legend] == ["K", "R", "O"]


def test_without_a_plan_there_is_no_picture() -> None:
    assert places_of(None, num_blocks=12) is None
