"""Published measurements: the rows keep to their rule, and the arithmetic of errors is exact."""

import csv
import dataclasses
from pathlib import Path

import pytest

from benchmarks.common.record import Row
from benchmarks.published.command import compare, compare_generation, list_open_facts, summarize
from benchmarks.published.generations import GENERATIONS_FILE, PublishedGeneration, read_generations
from benchmarks.published.models import PublishedModel, write_table
from benchmarks.published.profiles import Profiles
from benchmarks.published.rows import ROWS_FILE, PublishedRow, read_rows, select_runs
from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import find_device
from optimizer.profile.profile import Profile

ROWS = read_rows()
GENERATIONS = read_generations()
COLLECTED = [row for row in ROWS if row.family in ("megatron", "mpt")]
SMALL = next(row for row in ROWS if row.name.startswith("GPT 12x1024 s1024 b1 "))
RUN = {
    "source": "a paper, table 1",
    "system": "Megatron-DeepSpeed",
    "model": "GPT",
    "layers": "2",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "4",
    "ffn": "256",
    "vocab": "1000",
    "seq": "128",
    "global_batch": "8",
    "micro_batch": "2",
    "dp": "2",
    "tp": "1",
    "pp": "1",
    "zero": "0",
    "recompute": "full",
    "offload": "none",
    "precision": "fp16",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "2",
    "step_time_s": "0.5",
}


def test_there_are_more_than_80_rows_each_with_its_source_and_what_it_leaves_open() -> None:
    assert len(ROWS) >= 80
    for row in ROWS:
        assert row.source
        assert row.open_facts
        assert row.allocated_gb or row.step_s
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_rows_are_of_several_devices_systems_and_models_of_the_table() -> None:
    assert {find_device(row.device).generation for row in ROWS} >= {"turing", "ampere_data_center", "hopper"}
    assert len({row.system for row in ROWS}) >= 4
    assert len({row.model for row in ROWS}) >= 20


def test_no_row_of_the_collection_is_left_for_another_of_the_same_run_on_more_devices() -> None:
    keys = [
        (row.shape_key, row.system, row.device, row.sequence_length, row.micro_batch, row.recompute)
        for row in COLLECTED
    ]
    assert len(set(keys)) == len(keys)
    assert max(row.num_devices for row in COLLECTED) <= 8


def test_every_row_is_a_model_and_a_plan_that_the_estimator_knows() -> None:
    for row in {row.shape_key: row for row in ROWS}.values():
        spec = row.spec()
        row.plan(num_blocks=spec.num_blocks).check(num_blocks=spec.num_blocks, workload=row.workload())


@pytest.mark.parametrize(("rows", "file"), [(ROWS, ROWS_FILE), (GENERATIONS, GENERATIONS_FILE)])
def test_the_files_are_what_writing_their_rows_gives(tmp_path: Path, rows: list[PublishedModel], file: Path) -> None:
    write_table(rows, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_bytes() == file.read_bytes()


def test_a_batch_that_the_devices_do_not_make_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    write_table([dataclasses.replace(SMALL, global_batch=7)], file)
    with pytest.raises(InvalidInput, match="do not make a batch of 7"):
        read_rows(file)


def collection(folder: Path, *changes: dict[str, str]) -> Path:
    file = folder / "runs.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, RUN)
        writer.writeheader()
        writer.writerows(RUN | change for change in changes)
    return file


def test_a_run_on_more_and_fewer_devices_counts_with_the_fewer(tmp_path: Path) -> None:
    wider = {"n_gpus": "4", "dp": "4", "step_time_s": "0.3"}
    larger = {"global_batch": "16", "step_time_s": "0.9"}
    (row,) = select_runs(collection(tmp_path, wider, larger, {}))
    assert (row.num_devices, row.global_batch, row.step_s) == (2, 8, 0.5)
    assert row.accumulation_steps == 2


@pytest.mark.parametrize(
    "change",
    [
        {"tp": "2"},
        {"pp": "2"},
        {"offload": "optimizer-cpu"},
        {"n_gpus": "16"},
        {"precision": "fp8"},
        {"recompute": "selective"},
        {"gpu": "GB300"},
        {"step_time_s": ""},
        {"layers": ""},
    ],
    ids=lambda change: "_".join(f"{key}_{value}" for key, value in change.items()),
)
def test_runs_outside_the_rule_are_left_out(tmp_path: Path, change: dict[str, str]) -> None:
    assert select_runs(collection(tmp_path, change)) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def profile(folder: Path) -> Profile:
    return Profiles(folder=folder).training(SMALL)


def test_a_row_is_estimated_and_its_error_is_estimated_over_published(profile: Profile) -> None:
    compared = compare(SMALL, profile)
    assert compared["published_step_s"] == SMALL.step_s
    expected = compared["estimated_step_s"] / SMALL.step_s - 1
    assert compared["error_step_s"] == pytest.approx(expected, abs=1e-3)  # both are rounded to four places
    assert "error_allocated_gb" not in compared


def test_what_the_process_takes_is_compared_where_it_was_published(profile: Profile) -> None:
    row = dataclasses.replace(SMALL, allocated_gb=4.0, reserved_gb=4.5, process_gb=5.0, extra_bytes_per_logit=4)
    compared = compare(row, profile)
    allocated, logits_too, reserved, process = (
        compared[f"estimated_{figure}"]
        for figure in (
            "allocated_gb",
            "allocated_gb, same logits",
            "reserved_gb, same logits",
            "process_gb, same logits",
        )
    )
    assert logits_too == pytest.approx(allocated + row.extra_gb, abs=2e-4)  # each is rounded to four places
    assert logits_too < reserved < process


def test_a_generation_is_estimated_from_its_own_profile() -> None:
    # a small model in place of the published ones, which take longer to trace
    sizes = {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 100}
    row = dataclasses.replace(GENERATIONS[0], **sizes, allocated_gb=0.001, tokens_per_s=100.0)
    compared = compare_generation(row, Profiles().generation(row))
    estimated = compared["estimated_tokens_per_s"]
    assert compared["error_tokens_per_s"] == pytest.approx(estimated / 100 - 1, abs=1e-3)
    assert compared["estimated_generating allocated_gb"] > 0


def test_every_generation_is_a_model_and_a_plan_that_the_estimator_knows() -> None:
    for row in GENERATIONS:
        row.plan().check(workload=row.workload(), max_sequence_length=row.spec().max_sequence_length)
        assert row.source
        assert row.allocated_gb or row.tokens_per_s
    assert all(isinstance(row, PublishedGeneration) for row in GENERATIONS)


def test_a_model_is_traced_once_for_all_its_rows(folder: Path, profile: Profile) -> None:
    same = [row for row in ROWS if row.shape_key == SMALL.shape_key]
    assert len({row.micro_batch for row in same}) > 1
    profiles = Profiles(same, folder=folder)
    joined = profiles.training(SMALL)
    assert all(profiles.training(row) is joined for row in same)
    assert joined.num_blocks == profile.num_blocks


def row(error: float, *, device: str = "T4", is_inside: bool = True) -> Row:
    return {"name": "x", "system": "s", "device": device, "error_step_s": error, "in_interval_step_s": is_inside}


def test_the_summary_counts_every_row_by_device_and_system() -> None:
    rows = [row(-0.2), row(0.1, is_inside=False), row(-0.4, device="L4"), {"name": "y", "failed": "no such thing"}]
    summary = summarize(rows)
    assert summary["rows"]["value"] == 3
    assert summary["rows that could not be estimated"] == {"value": 1, "goal": 0, "met": False}
    assert summary["step_s, all"]["value"] == {
        "rows": 3,
        "median_error": -0.2,
        "median_absolute_error": 0.2,
        "worst_error": -0.4,
        "share_under": 0.667,
        "share_in_interval": 0.667,
    }
    assert summary["step_s, L4"]["value"]["rows"] == 1
    assert summary["step_s, s"]["value"]["rows"] == 3
    assert "allocated_gb, all" not in summary


def test_bytes_that_the_published_program_holds_of_the_logits_are_counted_from_its_source() -> None:
    # transformers' loss: fp32 logits held by the caller (4 bytes a logit)
    tiny = next(row for row in ROWS if row.name == "TinyLlama-1.1B LoRA r32 nf4 b12 s1024 T4")
    assert tiny.extra_gb == 12 * 1024 * 32_000 * 4 / 1e9


def test_open_facts_are_reported_once_for_a_system() -> None:
    facts = list_open_facts([SMALL, SMALL])
    assert facts == {"Megatron-DeepSpeed": SMALL.open_facts}


def test_a_row_is_frozen() -> None:
    assert dataclasses.is_dataclass(PublishedRow)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SMALL.vocab = 1  # type: ignore[misc]
