"""Training adapters as the command line asks for it: which profile is priced, what is trained, and how it fails."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli.main import main
from optimizer.models.spec import read_model_spec
from optimizer.profile.extent import Extent
from optimizer.profile.keep.kept import keep_profile
from optimizer.profile.trace.trace import profile_model
from optimizer.workload import Adapter
from tests.optimizer.profile.conftest import LLAMA

pytest.importorskip("peft")
WORK = ["--gpu", "T4", "--sequence-length", "40", "--batch", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json, and a home that holds the profile of that model with adapters of rank 2 at two modules."""
    folder = tmp_path_factory.mktemp("adapters")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    extent = Extent(representations=("fp32", "fp32/int8"), shapes=((1, 40),))
    adapter = Adapter(rank=2, targets=("q_proj", "v_proj"))
    profile = profile_model(read_model_spec(LLAMA), adapter=adapter, extent=extent)
    keep_profile(profile, folder=folder / "cache" / "profiles")
    return folder


@pytest.fixture
def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    monkeypatch.setenv("HEADROOM_HOME", str(folder))

    def run(command: str, *options: str) -> dict[str, Any]:
        code = main([command, "--model", str(folder), *WORK, *options])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return json.loads(captured.out)

    return run


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err.splitlines()[0]


ADAPTERS = ["--lora", "2", "--lora-targets", "q_proj", "v_proj"]


def test_adapters_alone_are_trained(run: Callable[..., dict[str, Any]]) -> None:
    found = run("estimate", *ADAPTERS, "--plan", "keep_all", "--json")
    width, key_width = LLAMA["hidden_size"], LLAMA["hidden_size"] // 2
    per_block = 2 * (width + width) + 2 * (width + key_width)
    assert found["num_parameters"] == LLAMA["num_hidden_layers"] * per_block
    assert found["workload"]["adapter"]["targets"] == ["q_proj", "v_proj"]


def test_frozen_matrices_are_packed_as_asked(run: Callable[..., dict[str, Any]]) -> None:
    plain = run("estimate", *ADAPTERS, "--plan", "keep_all", "--json")
    packed = run("estimate", *ADAPTERS, "--pack", "int8", "--plan", "keep_all", "--json")
    assert packed["plan"]["weights"] == {**plain["plan"]["weights"], "frozen": "int8"}
    of_weights = [found["prediction"]["device_bytes_by_category"]["weights"] for found in (plain, packed)]
    assert of_weights[1] < of_weights[0]


def test_a_plan_is_searched_for_adapters(run: Callable[..., dict[str, Any]]) -> None:
    found = run("plan", *ADAPTERS, "--json")
    assert found["chosen"]["plan"]["weights"]["frozen"] == "same"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "0"], "workload.adapter.rank is 0; allowed: an integer from 1 to 1,024"),
        (["--lora-targets", "q_proj"], "--lora-targets q_proj names modules for adapters that nothing asks for"),
        (["--lora", "2", "--lora-targets", "c_attn"], "workload.adapter.targets names 'c_attn'"),
        (["--lora", "2", "--new-tokens", "4"], "--lora is of training"),
        (["--pack", "nf4"], "--pack nf4 is of frozen matrices, and here every weight is trained"),
    ],
)
def test_a_contradiction_is_one_clear_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in fail(capsys, "estimate", "--model", str(folder), *WORK, *options)


def test_a_profile_of_training_every_weight_does_not_do(capsys: pytest.CaptureFixture[str]) -> None:
    line = fail(capsys, "estimate", "--profile", "profile.json", *WORK, "--lora", "2")
    assert line.endswith("--profile profile.json is of training every weight; to train adapters name the --model")
