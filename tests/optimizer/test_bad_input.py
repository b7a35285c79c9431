"""Whatever is asked wrongly is refused in the error tree's words: never a traceback, never a guess that is not said."""

import contextlib
import gc
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from benchmarks.zoo.tiny import make_tiny_config
from optimizer.api.estimate import estimate_model, estimate_profiled
from optimizer.api.inputs import read_model
from optimizer.base.errors import HeadroomError, InvalidModel
from optimizer.cli.main import main
from optimizer.goal import Goal
from optimizer.hardware.devices import table_machine
from optimizer.hardware.machine import Machine
from optimizer.models.spec import ModelSpec
from optimizer.plan.plan import Plan
from optimizer.profile.keep import child
from optimizer.profile.keep.asking import read_error
from optimizer.profile.profile import Profile
from optimizer.search.answer.baselines import BASELINES
from optimizer.workload import TrainingWorkload
from tests.fuzzing import JUNK, numbers, with_changes
from tests.optimizer.models.small_configs import SMALL_CONFIGS

WORKLOAD = TrainingWorkload(sequence_length=64, global_batch_size=4)
T4 = table_machine("T4")
PLAN = Plan.from_json(
    {
        "version": 2,
        "batch": {"micro_batch_size": 2, "accumulation_steps": 2},
        "activations": {"per_block": ["keep", "recompute", "offload", "keep"]},
    }
)
fuzzed = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.large_base_example],
)


def check_said(error: HeadroomError) -> None:
    assert error.message
    assert len(error.message) < 2_000
    json.dumps(error.to_json())


@pytest.mark.parametrize("values", [None, numbers], ids=["junk", "numbers"])
def test_a_config_with_anything_wrong_is_a_spec_or_an_error_of_the_tree(values: SearchStrategy | None) -> None:
    strategy = st.sampled_from(sorted(SMALL_CONFIGS)).flatmap(
        lambda name: with_changes(SMALL_CONFIGS[name], **({} if values is None else {"values": values}))
    )

    @settings(fuzzed, max_examples=150)
    @given(strategy)
    def check(config: dict[str, Any]) -> None:
        # A type that only transformers knows would be built by it, which takes seconds.
        if str(config.get("model_type")) not in SMALL_CONFIGS:
            config["model_type"] = None
        try:
            spec = read_model(config)
        except HeadroomError as error:
            check_said(error)
        else:
            assert isinstance(spec, ModelSpec)
            assert read_model(json.loads(json.dumps(spec.to_config()))) == spec

    check()


def price(profile: Profile, *, machine: Machine = T4, plan: Plan | str = PLAN) -> None:
    goal = Goal(device_budget_bytes=machine.device.memory_bytes)
    estimate = estimate_profiled(profile, machine=machine, workload=WORKLOAD, goal=goal, plan=plan)
    prediction = estimate.priced.prediction
    assert prediction.device_peak_bytes > 0
    assert 0 < prediction.step_ms < float("inf")


def test_a_changed_plan_is_priced_or_refused(llama_profile: Profile) -> None:
    @fuzzed
    @given(with_changes(PLAN.to_json()))
    def check(document: Any) -> None:
        try:
            price(llama_profile, plan=Plan.from_json(document))
        except HeadroomError as error:
            check_said(error)

    check()


def test_a_changed_machine_is_priced_or_refused(llama_profile: Profile) -> None:
    @fuzzed
    @given(with_changes(T4.to_json()))
    def check(document: Any) -> None:
        try:
            price(llama_profile, machine=Machine.from_json(document))
        except HeadroomError as error:
            check_said(error)

    check()


def test_a_changed_profile_is_priced_or_refused(llama_document: dict[str, Any]) -> None:
    @settings(fuzzed, max_examples=40)
    @given(with_changes(llama_document))
    def check(document: Any) -> None:
        try:
            price(Profile.from_json(document))
        except HeadroomError as error:
            check_said(error)

    check()


@pytest.fixture(scope="module")
def files(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that can lie where a file is asked for."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_text("no json")
    (folder / "list").write_text("[1, 2, 3]")
    (folder / "deep").write_text("[" * 100_000)
    (folder / "number").write_text("9" * 10_000)
    (folder / "other").write_text('{"model_type": 7, "chosen": [], "plan": {"plan": 1}}')
    with (folder / "huge").open("wb") as file:
        file.truncate(2**40)
    (folder / "folder").mkdir()
    (folder / "nowhere").symlink_to(folder / "gone")
    (folder / "round").symlink_to(folder / "round")
    os.mkfifo(folder / "pipe")
    there = [str(path) for path in sorted(folder.iterdir())]
    return {"profile": str(llama_folder / "profile.json"), "wrong": [*there, "", ".", "/", "\0", "x" * 5_000, "a/" * 3_000]}


def run(arguments: list[str]) -> tuple[int, str]:
    """The exit code and what stands on standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return code, errors.getvalue()


@pytest.mark.parametrize("option", ["--model", "--profile", "--machine", "--plan"])
def test_whatever_lies_where_a_file_is_asked_for_is_named(files: dict[str, Any], option: str) -> None:
    for path in files["wrong"]:
        arguments = {"--profile": files["profile"], "--gpu": "T4"}
        arguments.pop({"--model": "--profile", "--machine": "--gpu"}.get(option, option), None)
        arguments[option] = path
        code, errors = run(["estimate", *(part for pair in arguments.items() for part in pair)])
        assert code == 2, (option, path[:80])
        assert errors.startswith("error: "), (option, path[:80], errors[:300])
        assert "Traceback" not in errors


WORDS = st.one_of(
    st.sampled_from([str(value) for value in JUNK if isinstance(value, str | int | float)]).filter(str.isprintable),
    st.sampled_from(["-5 GiB", "5 XiB", "1e400 GiB", "0", "-0", "1e-9 KiB", "6 GiB", "10**9", "0x10", "١٢", "16"]),
)
OPTIONS = ("--gpu", "--sequence-length", "--batch", "--steps", "--budget", "--host-budget", "--disk-budget", "--max-grad-norm",
           "--optimizer", "--momentum", "--plan", "--dtype", "--lora", "--lora-targets", "--prompt-length", "--new-tokens",
           "--sequences", "--pack", "--weights")  # fmt: skip


def test_options_of_every_wrong_kind_end_in_an_answer_or_in_exit_code_2(files: dict[str, Any]) -> None:
    @fuzzed
    @given(st.dictionaries(st.sampled_from(OPTIONS), WORDS, min_size=1, max_size=3))
    def check(options: dict[str, str]) -> None:
        asked = {"--gpu": "T4", "--plan": "keep_all", "--sequence-length": "64", **options}
        given_ = [part for name, value in asked.items() for part in (name, value)]
        code, errors = run(["estimate", "--profile", files["profile"], *given_])
        assert code in (0, 2), options
        assert code == 0 or "error: " in errors
        assert "Traceback" not in errors

    check()


@pytest.mark.parametrize("gpu", ["", " ", "nvidia", "H100\0", "x" * 500, "RTX"])
def test_a_card_that_is_none_lists_the_table(files: dict[str, Any], gpu: str) -> None:
    code, errors = run(["estimate", "--profile", files["profile"], "--gpu", gpu])
    assert code == 2
    assert errors.startswith("error: GPU ")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": None}, "model is NoneType; allowed: a file's or a preset's name, or the content of a config.json"),
        ({"model": ["llama"]}, "model is list; allowed: "),
        ({"model": b"llama"}, "model is bytes; allowed: "),
        ({"model": {}}, "model_type is missing; allowed: "),
        ({"model": {"model_type": ["llama"]}}, "model_type \"['llama']\" is not supported; supported: "),
        ({"machine": 5}, "GPU 5 is not in the table; known: "),
        ({"machine": None}, "GPU None is not in the table; known: "),
        ({"machine": {"name": "T4"}}, "GPU {'name': 'T4'} is not in the table; known: "),
        ({"plan": 5}, "plan of type int is not one of best, "),
        ({"plan": {"version": 2}}, "plan of type dict is not one of best, "),
        ({"workload": {"sequence_length": 3}}, "workload is of type dict; allowed: a TrainingWorkload"),
    ],
)
def test_what_python_passes_wrongly_is_named(asked: dict[str, Any], words: str) -> None:
    given_ = {"model": "gpt2", "machine": "T4", "plan": "keep_all", **asked}
    with pytest.raises(HeadroomError) as caught:
        estimate_model(given_.pop("model"), **given_)
    assert caught.value.message.startswith(words)
    check_said(caught.value)


def test_every_baseline_is_priced_or_refused(llama_profile: Profile) -> None:
    for label in BASELINES:
        try:
            price(llama_profile, plan=label)
        except HeadroomError as error:
            check_said(error)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            make_tiny_config("jetmoe"),
            "the model cannot be traced: it decides by the values of its activations (tolist)",
        ),
        (
            {"model_type": "reformer", "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4},
            "transformers cannot build a reformer of this config: ValueError: ",
        ),
    ],
    ids=["a choice that depends on data", "sizes that do not fit"],
)
def test_a_model_that_cannot_be_traced_is_refused_with_the_reason(
    config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The child that ``estimate`` asks says it, and its caller understands it."""
    extent = {"representations": ["fp32"], "choices": ["keep"], "shapes": [[1, 40]]}
    request = {"config": config, "adapter": None, "extent": extent}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    try:
        assert child.main([]) == 0
    finally:
        gc.enable()  # which a process that only traces does without
    error = read_error(json.loads(capsys.readouterr().out)["error"])
    assert type(error) is InvalidModel
    assert error.message.startswith(words)
    assert error.hint
