"""A checkpoint is exported without a device, to the bits that the run itself leaves at that step."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.base.errors import CheckpointInvalid, DiskFull, ExportInvalid, InvalidWorkload
from optimizer.goal import Goal
from optimizer.models.build import build_model
from optimizer.models.files.packed.gguf_read import read_gguf
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.export import artifacts as artifacts_module
from optimizer.runtime.job.export import verify_export
from optimizer.runtime.job.export.export_checkpoint import CheckpointExport, export_checkpoint
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.workload import Adapter
from tests.optimizer.runtime.tiny import (
    artifacts_of,
    make_plan,
    make_spec,
    make_workload,
    write_token_file,
    write_tokenizer,
)

SIDECARS = {
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "x"},
    "generation_config.json": {"do_sample": True, "temperature": 0.6, "eos_token_id": [0, 3]},
    "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    published: Any = build_model(make_spec(), seed=11, dtype=torch.bfloat16)
    published.save_pretrained(folder)
    for name, document in SIDECARS.items():
        (folder / name).write_text(json.dumps(document))
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return folder


@pytest.fixture
def make_run(tmp_path: Path, model_folder: Path) -> Callable[..., TrainingRun]:
    tokens = write_token_file(tmp_path / "tokens")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")

    def make(plan: Plan, *, from_weights: bool = True, **changes: Any) -> TrainingRun:
        given = {"sample_tokens": 0, "eval_batches": 1, "checkpoint_every_steps": 3, **changes}
        return TrainingRun(
            spec=make_spec(),
            plan=plan,
            workload=make_workload(**given),
            goal=Goal(device_budget_bytes=2**40),
            device="cpu",
            attempt=1,
            fence=7,
            job_folder=tmp_path / "job",
            weights_folder=model_folder if from_weights else None,
            token_file=tokens,
            tokenizer_file=tokenizer,
        )

    return make


def carry_out(run: TrainingRun) -> list[Path]:
    """The folders of its checkpoints, in order."""
    messages: list[dict[str, Any]] = []
    train(run, report=messages.append, should_stop=lambda: False)
    return [run.job_folder / message["folder"] for message in messages if message["type"] == "checkpoint"]


def export(run: TrainingRun, checkpoint: Path, **changes: Any) -> tuple[dict[str, Any], Path]:
    folder = run.job_folder.parent / "exported"
    workload = dataclasses.replace(run.workload, export=dataclasses.replace(run.workload.export, **changes))
    result = export_checkpoint(
        CheckpointExport(
            spec=run.spec,
            plan=run.plan,
            workload=workload,
            checkpoint=checkpoint,
            weights_folder=run.weights_folder,
            model_folder=None,
            tokenizer_file=run.tokenizer_file,
            job_folder=folder,
            fence=9,
        ),
        report=lambda message: None,
    )
    return result, artifacts_of(folder)


CASES: dict[str, Any] = {
    "full, fp32": (WeightsPlan(), None, True),
    "full, bf16 with masters": (WeightsPlan(dtype="bf16"), None, True),
    "full, from nothing": (WeightsPlan(), None, False),
    "adapters": (WeightsPlan(dtype="bf16"), Adapter(rank=4), True),
    "adapters on nf4": (WeightsPlan(dtype="bf16", frozen="nf4"), Adapter(rank=4), True),
    "adapters on int8, from nothing": (WeightsPlan(frozen="int8"), Adapter(rank=4), False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_last_checkpoint_is_exported_to_the_bits_the_run_left(make_run: Callable[..., TrainingRun], name: str) -> None:
    weights, adapter, from_weights = CASES[name]
    plan = dataclasses.replace(make_plan("keep", "recompute", "keep"), weights=weights)
    run = make_run(plan, from_weights=from_weights, adapter=adapter)
    checkpoints = carry_out(run)
    result, folder = export(run, checkpoints[-1])
    assert (result["outcome"], result["step"]) == ("succeeded", 6)
    left = artifacts_of(run.job_folder)
    files = ["model/model.safetensors"] + (["adapter/adapter_model.safetensors"] if adapter else [])
    for file in files:
        assert (folder / file).read_bytes() == (left / file).read_bytes(), file


def test_an_earlier_checkpoint_is_exported_as_it_was(make_run: Callable[..., TrainingRun]) -> None:
    run = make_run(make_plan())
    first, last = carry_out(run)
    _, folder = export(run, first)
    stored = load_file(first / "model.safetensors")
    exported = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in exported.items())
    assert first != last


def test_what_makes_it_a_chat_model_goes_along_unchanged(make_run: Callable[..., TrainingRun], model_folder: Path) -> None:
    plan = dataclasses.replace(make_plan(), weights=WeightsPlan(dtype="bf16"))
    run = make_run(plan, adapter=Adapter(rank=4))
    _, folder = export(run, carry_out(run)[-1])
    for name in (*SIDECARS, "chat_template.jinja"):
        assert (folder / "model" / name).read_bytes() == (model_folder / name).read_bytes(), name
    assert (folder / "adapter" / "chat_template.jinja").is_file()
    assert not (folder / "adapter" / "generation_config.json").exists()


def test_transformers_and_peft_each_read_a_folder_of_their_own(make_run: Callable[..., TrainingRun]) -> None:
    """Where both lie in one folder, ``from_pretrained`` adds the adapters a second time."""
    from peft import PeftConfig
    from transformers import AutoModelForCausalLM

    plan = dataclasses.replace(make_plan(), weights=WeightsPlan())
    run = make_run(plan, adapter=Adapter(rank=4))
    _, folder = export(run, carry_out(run)[-1])
    merged = AutoModelForCausalLM.from_pretrained(folder / "model")
    stored = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(parameter, stored[name]) for name, parameter in merged.named_parameters())
    assert PeftConfig.from_pretrained(str(folder / "adapter")).peft_type == "LORA"


def test_a_gguf_file_of_a_checkpoint_holds_the_merged_model(make_run: Callable[..., TrainingRun]) -> None:
    plan = dataclasses.replace(make_plan(), weights=WeightsPlan())
    run = make_run(plan, adapter=Adapter(rank=4))
    result, folder = export(run, carry_out(run)[-1], gguf="f16", adapter="alone")
    assert {artifact["kind"] for artifact in result["artifacts"]} == {"adapter", "gguf"}
    header, model = read_gguf(folder / "gguf" / "model-f16.gguf")
    assert model.config["model_type"] == "llama"
    assert header.metadata["tokenizer.chat_template"].startswith("{% for message")


def test_gguf_of_another_kind_of_model_is_refused_before_anything_is_written(
    make_run: Callable[..., TrainingRun], tmp_path: Path
) -> None:
    run = make_run(make_plan(), from_weights=False)
    checkpoints = carry_out(run)
    other = dataclasses.replace(run, spec=make_spec("gpt2"))
    with pytest.raises(InvalidWorkload, match="models of type gpt2 cannot be written as GGUF"):
        export(other, checkpoints[-1], gguf="f16")


def test_a_damaged_checkpoint_is_not_exported(make_run: Callable[..., TrainingRun]) -> None:
    run = make_run(make_plan())
    checkpoint = carry_out(run)[-1]
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\1\2\3")
    with pytest.raises(CheckpointInvalid, match="does not have the sha256 of its manifest"):
        export(run, checkpoint)


def test_the_disk_is_asked_before_anything_is_written(
    make_run: Callable[..., TrainingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(make_plan())
    checkpoint = carry_out(run)[-1]
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DiskFull, match="the exported weights need .* of disk; 1000 B are free"):
        export(run, checkpoint)
    assert not (artifacts_of(run.job_folder.parent / "exported") / "model").exists()


def test_a_file_that_is_not_what_was_trained_fails_the_job(
    make_run: Callable[..., TrainingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(make_plan())
    checkpoint = carry_out(run)[-1]
    verify = verify_export.verify_model

    def damaged(folder: Path, *arguments: Any) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"][3] += 1e-6
        save_file(tensors, file)
        verify(folder, *arguments)

    monkeypatch.setattr(artifacts_module, "verify_model", damaged)
    with pytest.raises(ExportInvalid, match=r"tensor model\.norm\.weight, read again, is not what was trained"):
        export(run, checkpoint)


def test_an_adapter_that_peft_would_scale_otherwise_fails_the_job(
    make_run: Callable[..., TrainingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(dataclasses.replace(make_plan(), weights=WeightsPlan()), adapter=Adapter(rank=4, alpha=8))
    checkpoint = carry_out(run)[-1]
    verify = verify_export.verify_adapter

    def edited(folder: Path, *arguments: Any, **more: Any) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": 16}))
        verify(folder, *arguments, **more)

    monkeypatch.setattr(artifacts_module, "verify_adapter", edited)
    with pytest.raises(ExportInvalid, match="peft would scale the adapter of .* by 4; it was trained with 2"):
        export(run, checkpoint)
