"""Published systems on eight consumer cards become plans by rule."""

import pytest

from benchmarks.published.pools import (
    MODELS,
    NUM_DEVICES,
    SEQUENCE_LENGTH,
    PoolRow,
    rank_correlation,
    read_pool_rows,
    summarize_pools,
)

ROWS = {(row.system, row.model): row for row in read_pool_rows()}


def test_every_system_has_a_row_for_every_model() -> None:
    systems = {system for system, _ in ROWS}
    assert len(systems) == 6
    assert set(ROWS) == {(system, model) for system in systems for model in MODELS}


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: f"{row.system}, {row.model}")
def test_a_row_is_a_plan_of_all_devices(row: PoolRow) -> None:
    depth = MODELS[row.model]["num_hidden_layers"]
    for layout in row.layouts(depth):
        plan = row.plan(
            layout, depth=depth, micro_batch=row.micro_batch, num_micro_batches=row.num_at_once, num_tokens=SEQUENCE_LENGTH
        )
        assert plan.layout.num_devices == NUM_DEVICES
        assert plan.layout.is_cut == row.is_cut
        assert sum(layout.stage_blocks) == (depth if row.is_cut else 0)
        assert (plan.weights.place == "host") == (row.system in ("zero_infinity", "mobius", "roundpipe_sync"))


def test_megatrons_first_and_last_stage_have_fewer_blocks_where_they_are_not_even() -> None:
    (layout,) = ROWS["megatron_pp", "Qwen3-1.7B"].layouts(28)
    assert layout.stage_blocks == (2, 4, 4, 4, 4, 4, 4, 2)
    (layout,) = ROWS["megatron_pp", "Llama-3.1-8B"].layouts(32)
    assert layout.stage_blocks == (4,) * 8


def test_rank_correlation_is_one_for_the_same_order_and_minus_one_for_the_other() -> None:
    assert rank_correlation([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == 1
    assert rank_correlation([1.0, 2.0, 30.0], [7.0, 6.0, 5.0]) == -1
    assert rank_correlation([1.0], [1.0]) is None


def _found(*, published: float, estimated: float, of_fours: float) -> dict[str, float]:
    return {
        "published_tokens_per_s": published,
        "estimated_tokens_per_s": estimated,
        "estimated_tokens_per_s_of_fours": of_fours,
    }


def test_goals_are_judged_by_fit_order_and_length() -> None:
    row = {"pool": "fsdp", "model": "A", "published_fits": True, "estimated_fits": True, "published_longest": 1000}
    rows = [
        row | _found(published=10.0, estimated=20.0, of_fours=7.0) | {"estimated_longest": 900},
        row | _found(published=5.0, estimated=30.0, of_fours=6.0) | {"pool": "zero2", "estimated_longest": 1500},
    ]
    found = summarize_pools([*rows, {"pool": "zero2", "model": "B", "failed": "unknown"}])
    assert found["pools: share of cells whose fit is right"]["met"]
    assert found["pools: rank correlation of throughput"]["value"] == -1
    assert found["pools: rank correlation if four cards share a link to the host"]["value"] == 1
    assert found["pools: median error of the longest sequence"]["value"] == 0.3
