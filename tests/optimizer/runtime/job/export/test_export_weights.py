"""The trained weights are saved: from masters, from homes, unpacked, with adapters alone or added in."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from optimizer.models.adapters import base_name
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.export.artifacts import Artifact, Exported, leave_artifacts
from optimizer.runtime.job.export.export_weights import FinalWeights
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.layers.quantized_linear import list_base_tensors
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter, Export
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.tiny import NUM_BLOCKS, artifacts_of, make_spec, make_workload, write_tokenizer

CPU = torch.device("cpu")
AWAY = {"gradients": GradientsPlan(choice="host"), "optimizer_state": OptimizerStatePlan(place="host")}


def make_plan(*, weights: WeightsPlan = WeightsPlan(), **changes: Any) -> Plan:  # noqa: B008 (a value)
    batch, activations = BatchPlan(micro_batch_size=2, accumulation_steps=1), ActivationsPlan(per_block=("keep",) * NUM_BLOCKS)
    return Plan(batch=batch, activations=activations, weights=weights, **changes)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """A function: a trainer that has taken two steps."""
    trainers = []

    def make(spec: ModelSpec, *, plan: Plan, **changes: Any) -> Trainer:
        workload = make_workload(sample_tokens=0, learning_rate=0.05, **changes)
        model = build_prepared(spec, weights=plan.weights, workload=workload, device=CPU)
        trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=None, scratch=tmp_path / "scratch")
        trainers.append(trainer)
        for _ in range(2):
            step(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


def step(trainer: Trainer) -> None:
    batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=trainer.workload)
    trainer.step(batches, learning_rate=trainer.workload.learning_rate)


def save(trainer: Trainer, spec: ModelSpec, folder: Path) -> tuple[dict[tuple[str, str], Artifact], str]:
    tokenizer = folder / "tokenizer.json"
    folder.mkdir()
    exported = Exported(
        spec=spec,
        export=trainer.workload.export,
        trained_dtype=trainer.plan.weights.dtype,
        tokenizer_file=write_tokenizer(tokenizer),
        model_folder=None,
        job_folder=folder,
        fence=1,
    )
    artifacts, digest = leave_artifacts(trainer, exported, batches=None, enter_phase=lambda phase, message: None)
    return {(artifact.kind, artifact.name): artifact for artifact in artifacts}, digest


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(12)[None]).logits


def load_with_peft(base: Any, folder: Path) -> torch.nn.Module:
    from peft import PeftModel

    with warnings.catch_warnings():
        # peft 0.21 asks the model by a name that transformers 5 has put away.
        warnings.simplefilter("ignore", FutureWarning)
        return PeftModel.from_pretrained(base, str(folder))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi3", "opt", "mixtral"])
def test_saved_adapters_are_read_by_peft_and_the_merged_model_by_transformers(
    model_type: str, trained: Callable[..., Trainer], tmp_path: Path
) -> None:
    spec = read_model_spec({**SMALL_CONFIGS[model_type], "vocab_size": 512})
    trainer = trained(spec, plan=make_plan(), adapter=Adapter(rank=4))
    save(trainer, spec, tmp_path / "job")
    expected = logits_of(trainer.model)
    loaded = load_with_peft(build_model(spec, seed=0), artifacts_of(tmp_path / "job") / "adapter")
    assert torch.equal(logits_of(loaded), expected)
    read: Any = AutoModelForCausalLM.from_pretrained
    merged, info = read(artifacts_of(tmp_path / "job") / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    # One product with the sum instead of the sum of two products.
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits_of(build_model(spec, seed=0)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model_type", "form"), [("llama", "nf4"), ("gpt2", "int8"), ("phi3", "nf4"), ("mixtral", "int8")])
def test_merging_adds_the_adapter_to_exactly_the_weights_that_were_computed_with(
    model_type: str, form: str, trained: Callable[..., Trainer]
) -> None:
    spec = read_model_spec({**SMALL_CONFIGS[model_type], "vocab_size": 512})
    trainer = trained(spec, plan=make_plan(weights=WeightsPlan(frozen=form)), adapter=Adapter(rank=4, alpha=8))
    parameters = dict(trainer.model.named_parameters())
    unpacked = {
        base.name: base.make([parameters[name].detach() for name in base.sources])
        for base in list_base_tensors(trainer.model)
    }
    modules = {base_name(name): module for name, module in trainer.model.named_modules() if hasattr(module, "lora_A")}
    final = {entry.name: entry.read() for entry in FinalWeights.of_trainer(trainer).model_tensors(dtype=torch.float32)}
    assert final.keys() == unpacked.keys()
    num_adapted = 0
    for name, weight in final.items():
        module = modules.get(name.removesuffix(".weight"))
        if module is None or weight.dim() != 2:
            assert weight.dim() == 3 or torch.equal(weight, unpacked[name]), name
            continue
        num_adapted += 1
        delta = (module.lora_B["default"].weight @ module.lora_A["default"].weight).detach() * module.scaling["default"]
        assert torch.equal(weight, unpacked[name] + (delta.T if model_type == "gpt2" else delta)), name
    assert num_adapted >= 3 * 4


def test_only_what_was_asked_for_is_saved(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    names = {}
    for which in ("alone", "merged", "both"):
        trainer = trained(make_spec(), plan=make_plan(), adapter=Adapter(rank=4), export=Export(adapter=which))
        artifacts, _ = save(trainer, make_spec(), tmp_path / which)
        names[which] = {kind for kind, _ in artifacts}
    assert names == {"alone": {"adapter"}, "merged": {"model"}, "both": {"model", "adapter"}}
    assert sorted(path.name for path in (artifacts_of(tmp_path / "alone") / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_bf16_training_saves_its_fp32_masters_when_fp32_is_asked_for(
    trained: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = trained(make_spec(), plan=make_plan(weights=WeightsPlan(dtype="bf16")), export=Export(dtype="fp32"))
    save(trainer, make_spec(), tmp_path / "job")
    saved = load_file(artifacts_of(tmp_path / "job") / "model" / "model.safetensors")
    masters, _ = trainer.optimizer.export_state()
    for name, tensor in saved.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, masters[f"{name}//master"])
    weight = saved["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("adapter", [None, Adapter(rank=4)], ids=["full", "adapters"])
def test_streamed_weights_are_saved_to_the_same_bytes_and_training_goes_on(
    adapter: Adapter | None, place: str, trained: Callable[..., Trainer], tmp_path: Path
) -> None:
    elsewhere = {**AWAY, "weights": WeightsPlan(place=place)}
    digests: dict[str, Any] = {}
    for name, changes in {"resident": {}, "streamed": elsewhere}.items():
        trainer = trained(make_spec(), plan=make_plan(**changes), adapter=adapter)
        artifacts, digests[name] = save(trainer, make_spec(), tmp_path / name)
        digests[f"{name} files"] = {key: artifact.sha256 for key, artifact in artifacts.items()}
        step(trainer)
    assert digests["resident"] == digests["streamed"]
    assert digests["resident files"] == digests["streamed files"]


def test_shards_load_as_one_model_and_every_file_has_its_hash(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    spec = read_model_spec({**SMALL_CONFIGS["llama"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 512})
    trainer = trained(spec, plan=make_plan(), export=Export(max_shard_bytes=1_000_000, dtype="fp32"))
    artifacts, digest = save(trainer, spec, tmp_path / "job")
    shards = [name for _, name in artifacts if name.endswith(".safetensors")]
    assert len(shards) > 1
    assert "model.safetensors.index.json" in {name for _, name in artifacts}
    folder = artifacts_of(tmp_path / "job") / "model"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for ours, theirs in zip(trainer.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(digest) == 64


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_rounds_what_was_trained_once(
    dtype: str, trained: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = trained(make_spec(), plan=make_plan(), adapter=Adapter(rank=4), export=Export(dtype=dtype))
    save(trainer, make_spec(), tmp_path / "job")
    target = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    saved = load_file(artifacts_of(tmp_path / "job") / "model" / "model.safetensors")
    for entry in FinalWeights.of_trainer(trainer).model_tensors(dtype=torch.float32):
        assert torch.equal(saved[entry.name], entry.read().to(target)), entry.name
    adapters = load_file(artifacts_of(tmp_path / "job") / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapters.values()} == {target}
