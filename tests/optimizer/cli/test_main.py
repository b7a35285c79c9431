"""The planning commands as people run them: what they print, and how they fail."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, get_args

import pytest

from optimizer.base.units import format_bytes
from optimizer.cli.main import main
from optimizer.estimate.training import estimate_training
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import LOSSY, Technique
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.workload import TrainingWorkload
from tests import llama

WORK = ["--sequence-length", "128", "--batch", "4"]


@pytest.fixture(scope="module")
def files(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the profile command wrote for a real model, and a machine."""
    folder = tmp_path_factory.mktemp("planning")
    shutil.copy(llama_folder / "profile.json", folder)
    machine = table_machine("RTX 3060 12GB")
    device = replace(machine.device, kind="cpu")
    (folder / "machine.json").write_text(json.dumps(replace(machine, name="bench", device=device).to_json()))
    return folder


def plan_options(files: Path, *more: str) -> list[str]:
    return ["--profile", str(files / "profile.json"), "--machine", str(files / "machine.json"), *WORK, *more]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_plan_as_json_holds_a_plan_that_fits_when_priced_again(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_json(capsys, "estimate", *plan_options(files, "--plan", "keep_all"))
    budget_bytes = plain["prediction"]["device_peak_bytes"] * 6 // 10
    result = run_json(capsys, "plan", *plan_options(files, "--budget", str(budget_bytes)))
    plan = Plan.from_json(result["chosen"]["plan"])
    profile = Profile.from_json(json.loads((files / "profile.json").read_text()))
    machine = Machine.from_json(json.loads((files / "machine.json").read_text()))
    workload = TrainingWorkload(sequence_length=128, global_batch_size=4)
    prediction = estimate_training(profile, plan=plan, workload=workload, machine=machine)
    assert prediction.device_peak_high_bytes <= budget_bytes < plain["prediction"]["device_peak_bytes"]
    assert prediction.to_json() == {**result["chosen"]["prediction"], "memory": None, "stages": []}
    assert result["chosen"]["verdict"] == "fits"
    assert result["machine"]["name"] == "bench"


def test_plan_prints_baselines_the_frontier_and_the_reasons(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *plan_options(files, "--budget", "7 MiB")]) == 0
    text = capsys.readouterr().out
    for heading in ("Frontier", "Chosen plan", "At the peak, "):
        assert heading in text
    rows = [
        line for line in text.splitlines() if line.startswith(("keep_all", "recompute_all", "offload_all", "chosen"))
    ]
    assert [row.split()[0] for row in rows] == ["keep_all", "recompute_all", "offload_all", "chosen"]
    assert "7.00 MiB on the device" in text
    assert "<- chosen" in text
    assert "\x1b" not in text


def test_without_a_budget_the_whole_card_is_taken(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "plan", "--profile", str(files / "profile.json"), "--gpu", "T4", *WORK)
    assert result["chosen"]["plan"]["activations"]["per_block"] == ["keep"] * 4
    assert result["machine"]["rates"]["source"] == "table"


def test_forbidden_techniques_stay_out(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = run_json(capsys, "estimate", *plan_options(files, "--plan", "every_second"))
    budget = str(plain["prediction"]["device_peak_high_bytes"])
    result = run_json(
        capsys, "plan", *plan_options(files, "--budget", budget, "--forbid", "accumulate", "--forbid", "offload")
    )
    assert result["chosen"]["plan"]["batch"]["accumulation_steps"] == 1
    assert set(result["chosen"]["plan"]["activations"]["per_block"]) == {"keep", "recompute"}


def test_every_technique_can_be_forbidden(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forbidden = [option for name in get_args(Technique) for option in ("--forbid", name)]
    result = run_json(capsys, "plan", "--profile", str(files / "profile.json"), "--gpu", "T4", *WORK, *forbidden)
    assert all(not Plan.from_json(point["plan"]).techniques for point in result["frontier"])
    assert result["chosen"]["plan"]["batch"]["accumulation_steps"] == 1


def test_without_clipping_gradients_may_be_consumed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = plan_options(files, "--forbid", "offload_gradients", "--forbid", "recompute", "--forbid", "offload")
    clipped = run_json(capsys, "plan", *options)
    unclipped = run_json(capsys, "plan", *options, "--max-grad-norm", "0")
    choices = [
        {point["plan"]["gradients"]["choice"] for point in result["frontier"]} for result in (clipped, unclipped)
    ]
    assert choices == [{"keep"}, {"keep", "consume"}]


def test_what_lies_elsewhere_and_what_is_copied_have_columns(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *plan_options(files, "--plan", "offload_optimizer")]) == 0
    text = capsys.readouterr().out
    header, row = (line for line in text.splitlines() if line.startswith(("plan ", "offload_optimizer")))
    assert "elsewhere" in header
    assert "copied" in header
    assert row.endswith("fits")
    assert "the optimizer state lives on the host and is updated there" in text


def test_lossy_plans_need_to_be_allowed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strict = run_json(capsys, "plan", *plan_options(files, "--budget", "6 MiB"))
    assert strict["chosen"]["plan"]["weights"]["dtype"] == "fp32"
    relaxed = run_json(capsys, "plan", *plan_options(files, "--budget", "6 MiB", "--allow-lossy"))
    assert relaxed["chosen"]["prediction"]["step_ms"] < strict["chosen"]["prediction"]["step_ms"]


def test_a_chosen_plan_can_be_estimated_from_its_file(
    files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = run_json(capsys, "plan", *plan_options(files, "--budget", "7 MiB"))
    (tmp_path / "result.json").write_text(json.dumps(result))
    again = run_json(capsys, "estimate", *plan_options(files, "--plan", str(tmp_path / "result.json")))
    assert again["prediction"] == result["chosen"]["prediction"]


def test_estimate_prints_the_cost_of_all_steps_with_the_date_of_its_price(
    files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        '[[rentals]]\ndevice = "RTX 3060"\nprovider = "a neighbour"\nprice_per_hour = 3600.0\ncurrency = "EUR"\n'
        'date = "2026-11-20"\nsource = "agreed"\n'
    )
    monkeypatch.setenv("HEADROOM_PRICES", str(prices))
    found = run_json(capsys, "estimate", *plan_options(files, "--plan", "keep_all"))
    rent, energy = found["costs"]
    assert rent["amount"] == pytest.approx(found["prediction"]["total_s"])
    assert (rent["currency"], rent["price_date"], energy["kind"]) == ("EUR", "2026-11-20", "energy")
    assert main(["estimate", *plan_options(files, "--plan", "keep_all")]) == 0
    assert "a neighbour, agreed, price of 2026-11-20" in " ".join(capsys.readouterr().out.split())  # however lines are broken


def test_estimate_prints_the_bytes_of_each_category(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    priced = run_json(capsys, "estimate", *plan_options(files, "--plan", "recompute_all"))
    assert main(["estimate", *plan_options(files, "--plan", "recompute_all")]) == 0
    text = capsys.readouterr().out
    for name, size in priced["prediction"]["device_bytes_by_category"].items():
        if size:
            assert f"{name.replace('_', ' ')} " in text
            assert format_bytes(size) in text


def test_a_profile_file_names_the_model_it_was_made_of(files: Path) -> None:
    profile = Profile.from_json(json.loads((files / "profile.json").read_text()))
    assert profile.num_blocks == 4
    assert profile.model_fingerprint == read_model_spec(llama.CONFIG).fingerprint


def test_no_feasible_plan_is_one_line_and_what_would_fit(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error, hint, *ways = fail(capsys, "plan", *plan_options(files, "--budget", "100 KiB"))
    assert error.startswith("error: memory budget 100 KiB is under the smallest feasible peak ")
    assert hint == "hint: What would fit, what costs least first:"
    assert ways[0].startswith("- a budget of ")
    assert ways[0].endswith(" a step")
    assert ways[1].strip().startswith('--budget "')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--budget", "6 potatoes"], "error: --budget: size '6 potatoes' is not understood"),
        (["--sequence-length", "4"], "error: workload.sequence_length is 4; allowed: an integer from 8 to 131,072"),
        (["--sequence-length", "512"], "error: workload.sequence_length is 512; this model has positions for 8 to 256"),
        (["--batch", "0"], "error: workload.global_batch_size is 0; allowed: an integer from 1 to 1,000,000"),
    ],
)
def test_a_wrong_number_is_one_clear_line(
    files: Path, capsys: pytest.CaptureFixture[str], change: list[str], message: str
) -> None:
    assert fail(capsys, "plan", *plan_options(files, *change))[0].startswith(message)


def test_a_wrong_size_is_refused_before_the_machine_is_measured(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure() -> Never:
        raise AssertionError("the machine was measured")

    monkeypatch.setattr("optimizer.hardware.probe.probe.probe_machine", measure)
    lines = fail(capsys, "plan", "--model", "gpt2", "--budget", "12 bananas")
    assert lines[0].startswith("error: --budget: size '12 bananas' is not understood")


def test_an_unknown_model_names_the_presets(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fail(capsys, "plan", "--model", "skynet", "--gpu", "T4")
    assert lines[0].startswith("error: model 'skynet' is neither a file nor a preset; presets: ")
    assert "gpt2" in lines[0]


def test_an_unknown_plan_names_the_baselines(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fail(capsys, "estimate", *plan_options(files, "--plan", "hope"))
    known = ", ".join(BASELINES)
    assert "stream_all" in known
    assert lines == [f"error: plan 'hope' is neither a file nor one of best, {known}"]


def test_without_a_plan_plain_training_stands_beside_the_best_plan(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run_json(capsys, "estimate", *plan_options(files, "--plan", "keep_all"))
    budget = str(plain["prediction"]["device_peak_bytes"] * 6 // 10)
    found = run_json(capsys, "estimate", *plan_options(files, "--budget", budget))
    assert [plan["label"] for plan in found["plans"]] == ["keep_all", "chosen"]
    assert [plan["verdict"] for plan in found["plans"]] == ["does_not_fit", "fits"]
    assert found["plans"][0]["prediction"] == plain["prediction"]
    assert found["plans"][1]["plan"] == found["plan"]
    assert found["knobs"] == []
    best = run_json(capsys, "estimate", *plan_options(files, "--budget", budget, "--plan", "best"))
    assert best["plan"] == found["plan"]


def test_where_nothing_fits_plain_training_is_shown_and_why(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *plan_options(files, "--budget", "300 KiB")]) == 0
    text = capsys.readouterr().out
    assert "no plan that is allowed fits: memory budget 300 KiB is under the smallest feasible peak" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("keep_all", "chosen"))] == ["keep_all"]
    assert fail(capsys, "estimate", *plan_options(files, "--budget", "300 KiB", "--plan", "best"))[0].startswith(
        "error: memory budget 300 KiB is under the smallest feasible peak"
    )


def test_a_dtype_is_that_of_the_weights_where_no_plan_says_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "estimate", *plan_options(files, "--plan", "recompute_all", "--dtype", "autocast-fp16"))
    assert found["plan"]["weights"]["autocast"] == "fp16"
    found = run_json(capsys, "estimate", *plan_options(files, "--dtype", "bf16"))
    assert found["plans"][0]["plan"]["weights"]["dtype"] == "bf16"
    assert set(Plan.from_json(found["plan"]).techniques) & set(LOSSY) <= {"bf16"}


def test_explained_it_shows_the_peak_the_step_the_lanes_and_the_knobs(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", *plan_options(files, "--plan", "keep_all", "--explain")]) == 0
    text = capsys.readouterr().out
    for heading in ("Verdict: ", "At the peak, ", "Device memory over one step of ", "Lanes", "What each knob would buy"):
        assert heading in text
    assert "two moments of each trained weight in 32 bits" in text
    assert "recompute every block" in text
    bars = [line.partition("|")[2] for line in text.splitlines() if "|" in line]
    assert {len(bar) for bar in bars[1:-1]} <= set(range(73))
    assert bars[-1].startswith("f")
    assert len(bars) == 9


def test_the_explanation_in_json_adds_up_to_the_peak(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "estimate", *plan_options(files, "--plan", "offload_all", "--explain"))
    rows = found["explanation"]["categories"]
    assert sum(row["peak_bytes"] for row in rows) == found["prediction"]["device_peak_bytes"]
    assert all(row["highest_bytes"] >= row["peak_bytes"] for row in rows)
    for lane in found["explanation"]["lanes"]:
        assert lane["hidden_ms"] + lane["exposed_ms"] == pytest.approx(lane["busy_ms"])
    assert found["knobs"]


def test_a_missing_or_broken_file_is_named(files: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    lines = fail(capsys, "plan", "--profile", str(missing), "--gpu", "T4")
    assert lines == [f"error: --profile {missing}: No such file or directory"]
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    lines = fail(capsys, "plan", "--profile", str(files / "profile.json"), "--machine", str(broken))
    assert lines[0].startswith(f"error: --machine {broken} is not JSON: ")


def test_an_unknown_card_lists_the_table(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fail(capsys, "plan", "--profile", str(files / "profile.json"), "--gpu", "Voodoo 2")
    assert lines[0].startswith("error: GPU 'Voodoo 2' is not in the table; known: P100 16GB, ")
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b", ""])
def test_what_is_no_file_is_refused_without_being_read(
    capsys: pytest.CaptureFixture[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fail(capsys, "estimate", "--model", path, "--gpu", "T4")[0].startswith("error: ")


def test_plans_are_compared_in_columns_with_only_what_differs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *plan_options(files, "--compare", "keep_all", "recompute_all")]) == 0
    text = capsys.readouterr().out
    assert "What differs              keep_all" in text
    assert "activations               keep 4" in text
    assert "weights in" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_cards_are_ranked_with_what_each_plan_does(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["plan", "--profile", str(files / "profile.json"), *WORK, "--gpus", "T4,RTX 4090"]
    assert main(options) == 0
    told = capsys.readouterr()
    assert told.err == "0 of 2 cards done\n"
    lines = told.out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:5:2]] == ["RTX 4090", "T4"]
    assert lines[2].startswith("    keep 4")
    assert max(map(len, lines)) <= 100
    assert [card["card"] for card in run_json(capsys, *options)["cards"]] == ["RTX 4090", "T4"]


def test_an_objective_is_answered_with_its_limit(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = plan_options(files, "--objective", "longest-sequence", "--budget", "1 GiB")
    assert main(["plan", *options]) == 0
    assert "goal      the longest sequence" in capsys.readouterr().out
    result = run_json(capsys, "plan", *options)
    assert (result["limit"]["largest"], result["workload"]["sequence_length"]) == (256, 256)


def test_a_loss_of_quality_may_be_allowed_as_far_as_rounding(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = fail(capsys, "plan", *plan_options(files, "--allow-lossy", "rounding", "--pin", "weights.frozen=int8"))
    assert "goal.most_loss is rounding" in lines[0]


def test_pins_are_kept(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "plan", *plan_options(files, "--pin", "batch.micro_batch_size=2"))
    assert {point["plan"]["batch"]["micro_batch_size"] for point in result["frontier"]} == {2}


def test_where_nothing_fits_json_says_so_too(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *plan_options(files, "--budget", "100 KiB"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "no_feasible_plan"
    assert {way["kind"] for way in error["fields"]["ways_out"]} >= {"budget"}


def test_a_card_of_the_table_gets_the_host_and_the_disk_that_are_given(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--profile", str(files / "profile.json"), *WORK, "--gpu", "T4")
    machine = run_json(capsys, "plan", *options)["machine"]
    assert (machine["host_memory_bytes"], machine["disk_free_bytes"]) == (32 * 2**30, 256 * 2**30)
    machine = run_json(capsys, "plan", *options, "--host-memory", "64GiB", "--disk", "0")["machine"]
    assert (machine["host_memory_bytes"], machine["disk_free_bytes"]) == (64 * 2**30, 0)
    assert machine["rates"]["disk_read_bytes_per_s"] is None


@pytest.mark.parametrize("option", [("--host-memory", "64GiB"), ("--cards-per-switch", "2")])
def test_a_measured_machine_has_its_own_host(
    files: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    lines = fail(capsys, "plan", *plan_options(files, *option))
    assert f"{option[0]} says what is beside a card of the table" in lines[0]


@pytest.mark.parametrize(
    ("stated", "words"), [((), "a PCIe link for each card"), (("--cards-per-switch", "2"), "2 cards on each PCIe link")]
)
def test_cards_of_the_table_share_what_they_are_said_to(
    files: Path, capsys: pytest.CaptureFixture[str], stated: tuple[str, ...], words: str
) -> None:
    options = ("--profile", str(files / "profile.json"), *WORK, "--devices", "2x T4", *stated)
    assert main(["plan", *options]) == 0
    assert f"{words} (--cards-per-switch)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "gpt2"], "--models is for --objective largest-model, beside --model"),
        (["--models", "gpt2", "--objective", "largest-model"], "--models is for --objective largest-model, beside --model"),
        (["--gpus", "all"], "--gpus ranks cards; --gpu and --machine name one"),
        (["--compare", "best"], "1 plans are to be compared; allowed: 2 to 6"),
        (["--pin", "nothing"], "is not understood; allowed: KNOB=VALUE"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    files: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in fail(capsys, "plan", *plan_options(files, *options))[0]


def test_plan_on_two_cards_prints_each_layout_and_what_devices_send(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = ["--profile", str(files / "profile.json"), *WORK, "--forbid", "offload", "--forbid", "stream_weights"]
    assert main(["plan", *profile, "--devices", "2x RTX 4090", "--pin", "layout.num_devices=2"]) == 0
    printed = capsys.readouterr().out
    assert "2 alike, linked by the host's memory" in printed
    assert "2 devices, replicated" in printed
    assert "2 devices, zero1" in printed
    assert "peaks of the devices: " in printed
    assert "Setups that people write by hand" in printed
    rows = {line.split()[0]: line for line in printed.splitlines() if line.strip()}
    assert rows["ddp"].rstrip().endswith(("fits", "fits (tensors)"))
    assert rows["fsdp_recompute"].split()[1:3] != rows["ddp"].split()[1:3]
    assert "a device's part of each block was not traced" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 120


def test_plan_on_unequal_cards_prints_who_takes_how_much(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = ["--profile", str(files / "profile.json"), *WORK, "--forbid", "offload", "--forbid", "stream_weights"]
    asked = ["plan", *profile, "--devices", "2x RTX 3060, RTX 4090", "--pin", "layout.num_devices=3"]
    assert main([*asked, "--forbid", "cut_model"]) == 0
    printed = capsys.readouterr().out
    assert "2x RTX 3060 12GB, 1x RTX 4090, linked by the host's memory" in printed
    assert "RTX 4090 + 2x RTX 3060 12GB, replicated" in printed
    assert "3 devices, each keeps everything, of unequal shares" in printed
    assert "is the slowest, and all wait for it" in printed
    assert main([*asked, "--pin", "layout.stage_blocks=1,1,2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "the model cut into 1 + 1 + 2 blocks: chosen" in printed
    assert re.search(r"rank 2 on RTX \S+( 12GB)? has blocks 3 to 4 \(2 blocks keep\): .* at work for", printed)


def test_plan_on_joined_machines_prints_each_devices_machine_and_both_links(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = ["--profile", str(files / "profile.json"), *WORK, "--forbid", "offload", "--forbid", "stream_weights"]
    joined = ["--devices", "2x RTX 4090, RTX 3060@office", "--link", "office=100Mbit,20ms"]
    assert main(["plan", *profile, *joined]) == 0
    printed = capsys.readouterr().out
    assert "2x RTX 4090@here, 1x RTX 3060 12GB@office, linked by a network with 20.1 ms of delay, 12.0 MB/s each way" in printed
    assert "in here by the host's memory, 16.4 GB/s each way" in printed
    assert "beside each" in printed
    assert "2x RTX 4090@here and 1x RTX 3060 12GB@office, shares by speed: not searched" in " ".join(printed.split())
    assert re.search(r"RTX 4090@here alone: chosen; .* would wait for each other", " ".join(printed.split()))


def test_a_generation_is_not_planned_over_machines(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    joined = ["--devices", "RTX 4090, RTX 3060@office", "--link", "office=1Gbit,1ms"]
    work = ["--prompt-length", "8", "--new-tokens", "4", "--sequences", "2"]
    lines = fail(capsys, "plan", "--model", "qwen2.5-0.5b", *work, *joined)
    assert any("generations run on the devices of one machine" in line for line in lines), lines


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices", "2x RTX 4090", "--gpu", "RTX 4090"], "--devices names a card (RTX 4090)"),
        (["--devices", "1x RTX 4090, 1x T4@host-b"], "write --link host-b=100Mbit,20ms"),
        (["--devices", "RTX 4090, T4@b", "--link", "b=slow"], "link 'slow' is no network's"),
        (["--gpu", "RTX 4090", "--link", "b=1Gbit,1ms"], "a link is given for machine 'b'; the devices are in here"),
        (["--devices", "2", "--link", "b=1Gbit,1ms"], "--link b=1Gbit,1ms joins machines, but --devices names no cards"),
        (["--devices", "1x RTX 4090, 2"], "names no card in one of its parts"),
        (["--devices", "RTX 4090, RTX 3060", "--gpu", "RTX 4090"], "names a card (RTX 4090, RTX 3060 12GB)"),
        (["--devices", "RTX 4090, RTX 3090", "--peer-link", "nvlink"], "it joins cards that are alike"),
        (["--devices", "RTX 4090, RTX 3090", "--objective", "largest-batch"], "of several kinds; allowed: fastest_step"),
        (["--devices", "2x RTX 4090", "--peer-link", "nvlink"], "has no NVLink"),
        (["--devices", "2", "--gpus", "all"], "--devices is for one plan, of training or of a generation"),
    ],
)
def test_devices_that_cannot_be_planned_for_are_refused_in_words(
    files: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    lines = fail(capsys, "plan", "--profile", str(files / "profile.json"), *WORK, *options)
    assert any(words in line for line in lines), lines
