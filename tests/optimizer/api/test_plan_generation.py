"""Generations asked of the library and of ``headroom plan``: pins, plans side by side, cards ranked; refused in words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.api.plan_generation import compare_model_generations, plan_generation, rank_model_cards_to_generate
from optimizer.base.errors import InvalidInput
from optimizer.base.units import GIB
from optimizer.cli.main import main
from optimizer.goal import GenerationGoal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.rental import read_prices
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import read_generation_pins
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import GenerationWorkload
from tests.optimizer.models.small_configs import SMALL_CONFIGS

SPEC = read_model_spec(SMALL_CONFIGS["llama"])
WORKLOAD = GenerationWorkload(prompt_length=8, num_new_tokens=6, num_sequences=4)
PACKED = GenerationPlan(batch_size=2, weights=WeightsPlan(dtype="bf16", place="host"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the model, and with profiles that are kept from test to test."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SPEC.to_config()))
    (folder / "packed.json").write_text(json.dumps(PACKED.to_json()))
    return folder


@pytest.fixture
def plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """The command: its status, and what it wrote."""
    monkeypatch.setenv("HEADROOM_HOME", str(folder))
    asked = ["--model", str(folder), "--sequences", "4", "--prompt-length", "8", "--new-tokens", "6"]

    def run(*options: str) -> tuple[int, str]:
        status = main(["plan", *asked, *options])
        written = capsys.readouterr()
        return status, written.out if status == 0 else written.err

    return run


def in_json(written: tuple[int, str]) -> dict[str, Any]:
    status, text = written
    assert status == 0
    return json.loads(text)


def test_pins_of_the_command_are_those_of_the_library(plan: Callable[..., tuple[int, str]], folder: Path) -> None:
    pins = ["batch_size=2", "kv_cache.place=host", "prefill_tokens=all"]
    found = in_json(plan("--gpu", "T4", *(word for pin in pins for word in ("--pin", pin)), "--json"))
    goal = GenerationGoal(device_budget_bytes=table_machine("T4").device.memory_bytes, pins=read_generation_pins(pins))
    asked = plan_generation(folder, machine="T4", workload=WORKLOAD, goal=goal, profiles_folder=folder / "cache" / "profiles")
    assert found["chosen"] == asked.chosen.to_json()
    chosen = found["chosen"]["plan"]
    assert (chosen["batch_size"], chosen["kv_cache"]["place"], chosen["prefill_tokens"]) == (2, "host", None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "T4", "--pin", "optimizer_state.bits=8"], "pin 'optimizer_state.bits=8' is not understood; allowed:"),
        (["--gpu", "T4", "--pin", "kv_cache.dtype=int8"], "goal.allow_lossy is false"),
        (["--gpu", "T4", "--pin", "batch_size=5"], "allowed are 1 to 4"),
        (["--gpu", "T4", "--compare", "best"], "1 plans are to be compared; allowed: 2 to 6"),
        (["--gpu", "T4", "--compare", "best", "keep_all"], "plan 'keep_all' is not one of best, resident"),
        (["--gpu", "T4", "--gpus", "all"], "--gpus ranks cards; --gpu and --machine name one"),
        (["--gpus", "T4,Voodoo 2"], "GPU 'Voodoo 2' is not"),
        (["--gpu", "T4", "--lora", "8"], "--lora is of plans to train"),
        (["--gpu", "T4", "--objective", "largest-batch"], "is said by --generate-for"),
        (["--gpu", "T4", "--objective", "longest-sequence"], "--objective longest-sequence is of plans to train"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_words(
    plan: Callable[..., tuple[int, str]], options: list[str], words: str
) -> None:
    status, error = plan(*options)
    assert status == 2
    assert words in error


def test_a_training_plans_pins_are_still_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADROOM_HOME", str(folder))
    assert main(["plan", "--model", str(folder), "--gpu", "T4", "--pin", "kv_cache.place=host"]) == 2
    said = capsys.readouterr().err
    assert "pin 'kv_cache.place=host' is not understood; allowed: KNOB=VALUE with one of layout.num_devices" in said


def test_plans_stand_side_by_side_with_only_what_differs(plan: Callable[..., tuple[int, str]], folder: Path) -> None:
    asked = ["--gpu", "T4", "--allow-lossy", "rounding", "--compare", "best", "one_at_a_time", str(folder / "packed.json")]
    found = in_json(plan(*asked, "--json"))
    assert [priced["label"] for priced in found["plans"]] == ["best", "one_at_a_time", "packed.json"]
    decided = {decision["knob"]: decision["values"] for decision in found["decisions"]}
    assert decided["weights.place"] == ["device", "device", "host"]
    assert "kv_cache.place" not in decided
    status, text = plan(*asked)
    assert status == 0
    assert "What differs" in text
    assert "weights place             device" in text
    assert "kv cache place" not in text
    assert "Where the peak is" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_library_compares_a_plan_that_the_goal_would_not_allow(folder: Path) -> None:
    plans = {"ours": "best", "theirs": PACKED}
    kept = folder / "cache" / "profiles"
    found = compare_model_generations(folder, plans, machine="T4", workload=WORKLOAD, profiles_folder=kept)
    assert [priced.plan.is_lossless for priced in found.plans] == [True, False]
    with pytest.raises(InvalidInput, match="1 plans are to be compared"):
        compare_model_generations(folder, {"ours": "best"}, machine="T4")


def test_cards_are_ranked_by_speed_and_by_money(plan: Callable[..., tuple[int, str]], folder: Path) -> None:
    by_speed = in_json(plan("--gpus", "T4,RTX 4090", "--pin", "weights.place=device", "--json"))
    assert by_speed["order"] == "speed"
    assert [card["card"] for card in by_speed["cards"]] == ["RTX 4090", "T4"]
    assert by_speed["cards"][0]["tokens_per_s"] > by_speed["cards"][1]["tokens_per_s"]
    by_money = in_json(plan("--gpus", "T4,RTX 4090", "--objective", "cheapest-run", "--json"))
    rents = [
        cost["per_million_tokens"] for card in by_money["cards"] for cost in card["costs"] if cost["kind"] == "rented"
    ]
    assert by_money["order"] == "money"
    assert len(rents) == 2
    assert rents == sorted(rents)
    status, text = plan("--gpus", "T4,RTX 4090")
    assert status == 0
    assert "a million tokens of 24" in text
    assert "4 at once" in text


def test_the_library_ranks_cards_as_the_command_does(plan: Callable[..., tuple[int, str]], folder: Path) -> None:
    answers = rank_model_cards_to_generate(
        folder,
        ["T4", "RTX 4090"],
        workload=WORKLOAD,
        goal=GenerationGoal(device_budget_bytes=4 * GIB),
        prices=read_prices(),
        profiles_folder=folder / "cache" / "profiles",
    )
    found = in_json(plan("--gpus", "T4,RTX 4090", "--budget", "4 GiB", "--json"))
    assert [answer.to_json() for answer in answers] == found["cards"]


def test_where_nothing_fits_a_program_gets_the_reason_in_json(
    plan: Callable[..., tuple[int, str]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt-length", "8", "--new-tokens", "6", "--budget", "1000 B", "--json"]
    assert main(["plan", "--model", str(folder), "--gpu", "T4", *asked]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "no_feasible_plan"
    assert error["fields"]["smallest_feasible_bytes"] > 1000
