"""A job's goal may aim at time, or at money over the machines there are; objectives that change the work are asked elsewhere."""

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidWorkload
from optimizer.hardware.devices import table_machine
from tests.webapp.conftest import make_spec
from webapp.catalog.actions import register_machine
from webapp.catalog.models import Dataset, Machine, Model
from webapp.planning.pricing import price_spec

pytestmark = pytest.mark.django_db

WORKLOAD = {"sequence_length": 128, "global_batch_size": 4, "num_steps": 10}
FORBID = ["offload", "offload_optimizer", "offload_gradients", "stream_weights"]


def goal_of(objective: str) -> dict[str, Any]:
    return {"device_budget_bytes": 2**30, "objective": objective, "forbid": FORBID}


@pytest.mark.parametrize(("objective", "card"), [("fastest_step", "H100 PCIe"), ("cheapest_run", "T4")])
def test_among_machines_the_fastest_or_the_cheapest_is_chosen(
    ada: User,
    profiled_llama: Model,
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    objective: str,
    card: str,
) -> None:
    prices = tmp_path / "prices.toml"
    row = (
        '[[rentals]]\ndevice = "{}"\nprovider = "P"\nprice_per_hour = {}\n'
        'currency = "USD"\ndate = "2025-06-01"\nsource = "here"\n'
    )
    prices.write_text(row.format("T4", 0.01) + row.format("H100 PCIe", 9.0))
    monkeypatch.setenv("HEADROOM_PRICES", str(prices))
    for name in ("T4", "H100 PCIe"):
        register_machine(name=name, document=table_machine(name).to_json())
    answer = price_spec(ada, make_spec(profiled_llama, dataset, workload=WORKLOAD, goal=goal_of(objective)))
    (chosen,) = [offer.row.machine.name for offer in answer.offers if offer.is_chosen]
    assert chosen == card


def test_an_objective_that_changes_the_work_is_refused_with_where_to_ask(
    ada: User, machine: Machine, profiled_llama: Model, dataset: Dataset
) -> None:
    with pytest.raises(InvalidWorkload) as caught:
        price_spec(ada, make_spec(profiled_llama, dataset, workload=WORKLOAD, goal=goal_of("longest_sequence")))
    assert caught.value.fields["field"] == "goal.objective"
    assert "POST /plans/best" in caught.value.hint
