"""The decoder as a model of this program: read from a config, built, causal in every form, counted, saved and loaded."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import InvalidModel
from optimizer.models.adapters import attach_adapters, list_sites
from optimizer.models.anatomy import find_anatomy, find_blocks
from optimizer.models.build import build_model, load_model
from optimizer.models.files.export import export_model
from optimizer.models.presets import PRESETS
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter, TrainingWorkload

BASE: dict[str, Any] = {
    "model_type": "headroom_decoder",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_block": 8,
    "local_window": 12,
    "sparse_local_blocks": 2,
}
EVERY_KIND = ["full", "local", "block_sparse", "linear"]
OPTIONS: dict[str, Any] = {
    "plain": {},
    "local": {"layer_types": ["local"] * 4},
    "block_sparse": {"layer_types": ["block_sparse"] * 4},
    "linear": {"layer_types": ["linear"] * 4},
    "mixture": {"layer_types": EVERY_KIND},
    "relu features": {"layer_types": ["linear"] * 4, "linear_feature_map": "relu"},
    "shared by two": {"share_every": 2},
    "shared by all": {"share_every": 4, "layer_types": EVERY_KIND},
    "shared unevenly": {"share_every": 3},
    "post": {"norm_place": "post", "norm": "layer", "use_bias": True, "activation": "gelu", "positions": "learned"},
    "both": {"norm_place": "both", "tie_word_embeddings": False, "positions": "none"},
    "layer norm without bias": {"norm": "layer", "fused_qkv": False},
    "every kind, apart": {"layer_types": EVERY_KIND, "fused_qkv": False, "positions": "none", "num_key_value_heads": 4},
    "every kind with dropout": {"layer_types": EVERY_KIND, "attention_dropout": 0.1},
    "narrow heads": {"layer_types": ["linear"] * 4, "head_dim": 2, "num_key_value_heads": 4},
    "wide heads": {"head_dim": 24, "num_key_value_heads": 1},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_spec(name: str = "plain", **changes: Any) -> ModelSpec:
    return read_model_spec({**BASE, **OPTIONS[name], **changes})


def make_ids(length: int = 40, batch: int = 2) -> torch.Tensor:
    return torch.randint(131, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("length", [8, 29, 40])
def test_a_later_token_changes_nothing_before_it(name: str, length: int) -> None:
    model = build_model(make_spec(name), dtype=torch.float64).eval()
    ids = make_ids(length)
    changed = ids.clone()
    place = length // 2
    changed[:, place] = (changed[:, place] + 1) % 131
    with torch.no_grad():
        before, after = (model(tokens).logits for tokens in (ids, changed))
    assert (before[:, :place] - after[:, :place]).abs().max() < 1e-12
    assert not torch.equal(before[:, place:], after[:, place:])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_longer_sequence_gives_the_same_beginning(name: str) -> None:
    model = build_model(make_spec(name), dtype=torch.float64).eval()
    ids = make_ids(40)
    with torch.no_grad():
        assert (model(ids).logits[:, :13] - model(ids[:, :13]).logits).abs().max() < 1e-12


@pytest.mark.parametrize("name", OPTIONS)
def test_backbone_and_logits_give_what_the_model_gives(name: str) -> None:
    model = build_model(make_spec(name)).eval()
    anatomy = find_anatomy(model)
    hidden = anatomy.backbone(input_ids=make_ids(), use_cache=False).last_hidden_state
    assert torch.equal(anatomy.compute_logits(hidden), model(make_ids()).logits)
    assert anatomy.head.out_features == 131


@pytest.mark.parametrize("name", OPTIONS)
def test_every_form_trains_each_of_its_parameters(name: str) -> None:
    model = build_model(make_spec(name))
    model(make_ids(), labels=make_ids()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_parameter_count_without_torch_is_the_built_one(name: str) -> None:
    spec = make_spec(name)
    model = build_model(spec, device="meta")
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(find_blocks(model)) == spec.num_blocks


def test_fused_projections_compute_what_separate_ones_do() -> None:
    fused, separate = (build_model(make_spec(fused_qkv=fused), dtype=torch.float64).eval() for fused in (True, False))
    weights = dict(fused.named_parameters())
    with torch.no_grad():
        for name, parameter in separate.named_parameters():
            part = name.split(".")[-2]
            if part in ("q_proj", "k_proj", "v_proj"):
                rows = weights[name.replace(part, "qkv_proj")].split((32, 16, 16))
                parameter.copy_(rows["qkv".index(part[0])])
            else:
                parameter.copy_(weights[name])
        assert (fused(make_ids()).logits - separate(make_ids()).logits).abs().max() < 1e-12


@pytest.mark.parametrize("share_every", [2, 3, 4])
def test_blocks_of_a_group_are_modules_of_their_own_with_the_same_parameters(share_every: int) -> None:
    blocks = find_blocks(build_model(make_spec(share_every=share_every)))
    assert len({id(block) for block in blocks}) == 4
    for (left, one), (right, other) in itertools.combinations(enumerate(blocks), 2):
        pairs = list(zip(one.parameters(), other.parameters(), strict=True))
        is_shared = left // share_every == right // share_every
        assert all((a is b) == is_shared for a, b in pairs)


def test_a_shared_model_computes_what_an_unshared_one_with_equal_weights_does() -> None:
    shared, plain = build_model(make_spec("shared by two")).eval(), build_model(make_spec()).eval()
    plain.load_state_dict(shared.state_dict())
    assert torch.equal(shared(make_ids()).logits, plain(make_ids()).logits)


def test_positions_matter_where_there_are_any() -> None:
    ids = torch.full((1, 16), 7)
    for positions, differs in (("rope", False), ("learned", True), ("none", False)):
        # One token repeated: rotary positions alone do not distinguish its places.
        logits = build_model(make_spec(positions=positions), dtype=torch.float64).eval()(ids).logits
        assert ((logits[0, 3] - logits[0, 9]).abs().max() > 1e-6) == differs
    ids = make_ids(16, batch=1)
    swapped = ids[:, [1, 0, *range(2, 16)]]
    for positions, differs in (("rope", True), ("none", False)):
        model = build_model(make_spec(positions=positions, num_hidden_layers=1), dtype=torch.float64).eval()
        change = (model(ids).logits[0, -1] - model(swapped).logits[0, -1]).abs().max()
        assert (change > 1e-9) == differs


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    spec = make_spec("mixture")
    first, second, third = (build_model(spec, seed=seed) for seed in (5, 5, 6))
    weights = list(zip(first.parameters(), second.parameters(), third.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in weights)
    assert any(not torch.equal(one, three) for one, _, three in weights)


def test_dropout_draws_while_training_only() -> None:
    model = build_model(make_spec("mixture", dropout=0.1, attention_dropout=0.1))
    assert not torch.equal(model(make_ids()).logits, model(make_ids()).logits)
    model.eval()
    assert torch.equal(model(make_ids()).logits, model(make_ids()).logits)


def run_step(spec: ModelSpec, choices: tuple[str, ...]) -> tuple[float, list[torch.nn.Parameter]]:
    """Loss and weights after two optimizer steps from the same start."""
    model = build_model(spec, seed=3)
    plan = Plan(
        batch=BatchPlan(micro_batch_size=2, accumulation_steps=2), activations=ActivationsPlan(per_block=choices)
    )
    workload = TrainingWorkload(sequence_length=24, global_batch_size=4)
    trainer = Trainer(model, plan=plan, workload=workload, device=torch.device("cpu"), meter=None)
    torch.manual_seed(5)
    for _ in range(2):
        batches = make_synthetic_batches(model, plan=plan, workload=workload)
        loss = trainer.step(batches, learning_rate=1e-3).loss
    trainer.close()
    return loss, list(model.parameters())


@pytest.mark.parametrize("name", ["mixture", "shared by all", "post"])
def test_recompute_and_offload_give_the_bits_of_keep(name: str) -> None:
    spec = make_spec(name, dropout=0.1, attention_dropout=0.1)
    loss, weights = run_step(spec, ("keep",) * 4)
    for choices in (("recompute",) * 4, ("selective",) * 4, ("offload", "keep", "recompute", "offload")):
        other_loss, other_weights = run_step(spec, choices)
        assert other_loss == loss, choices
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)), choices


@pytest.mark.parametrize("name", OPTIONS)
def test_every_form_runs_under_autocast_near_what_it_computes_without(name: str) -> None:
    model = build_model(make_spec(name)).eval()
    plain = model(make_ids(), labels=make_ids()).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(make_ids(), labels=make_ids()).loss
    mixed.backward()
    # bf16 has 8 bits; the loss is a mean over 78 tokens.
    assert abs(mixed.item() - plain.item()) < 0.02
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["mixture", "shared unevenly", "both", "post"])
@pytest.mark.parametrize("max_shard_bytes", [None, 40_000])
def test_an_exported_folder_loads_to_the_same_model(tmp_path: Path, name: str, max_shard_bytes: int | None) -> None:
    spec = make_spec(name)
    model = build_model(spec, seed=3).eval()
    export_model(model, spec, folder=tmp_path / "model", max_shard_bytes=max_shard_bytes)
    loaded = load_model(tmp_path / "model")
    assert torch.equal(loaded(make_ids()).logits, model(make_ids()).logits)
    assert read_model_spec(json.loads((tmp_path / "model" / "config.json").read_text())).num_blocks == 4


def test_an_exported_folder_loads_in_the_dtype_it_was_written_in(tmp_path: Path) -> None:
    spec = make_spec()
    export_model(build_model(spec), spec, folder=tmp_path / "model", dtype="bf16")
    assert {p.dtype for p in load_model(tmp_path / "model").parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load_model(tmp_path / "model", dtype=torch.float32).parameters()} == {torch.float32}


def test_padding_at_the_end_is_taken_and_padding_at_the_start_refused() -> None:
    model = build_model(make_spec("mixture")).eval()
    ids, mask = make_ids(16), torch.ones(2, 16, dtype=torch.long)
    mask[:, 12:] = 0
    assert torch.equal(model(ids, attention_mask=mask).logits, model(ids).logits)
    with pytest.raises(ValueError, match="must be padded at their end"):
        model(ids, attention_mask=mask.flip(1))


def test_more_tokens_than_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens; the model has positions for 64"):
        build_model(make_spec())(make_ids(65))


@pytest.mark.parametrize("fused_qkv", [True, False])
def test_every_matrix_of_its_blocks_can_have_an_adapter(fused_qkv: bool) -> None:
    model, plain = (build_model(make_spec("mixture", fused_qkv=fused_qkv)).eval() for _ in range(2))
    attach_adapters(model, Adapter(rank=4), seed=1)
    num_matrices = sum(isinstance(module, torch.nn.Linear) for module in find_blocks(plain)[0].modules())
    assert len(list_sites(model)) == 4 * num_matrices
    assert torch.equal(model(make_ids()).logits, plain(make_ids()).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_types": ["full", "dense", "full", "full"]},
            "layer_types is .*allowed: a list of full, local, block_sparse",
        ),
        ({"layer_types": ["full"]}, "allowed: one entry for each of 4 layers"),
        ({"head_dim": 7}, "head_dim is 7; allowed: an even number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads"),
        ({"share_every": 5}, r"share_every is 5; allowed: 1 to num_hidden_layers \(4\)"),
        ({"share_groups": [2, 1]}, r"share_groups is \[2, 1\]; allowed: sizes that sum to num_hidden_layers \(4\)"),
        (
            {"layer_types": ["linear"] * 4, "attention_block": 12},
            r"attention_block is 12; allowed: a divisor of .*\(16\)",
        ),
        (
            {"layer_types": ["local"] * 4, "attention_block": 128},
            "attention_block is 128; allowed: at most max_position",
        ),
        (
            {"layer_types": ["block_sparse"] * 4, "sparse_global_blocks": 9},
            "sparse_global_blocks is 9; allowed: at most 8",
        ),
        ({"activation": "relu"}, "activation is relu; allowed: swiglu, gelu"),
        ({"norm_place": "nowhere"}, "norm_place is nowhere; allowed: pre, post, both"),
        ({"positions": "alibi"}, "positions is alibi; allowed: rope, learned, none"),
        ({"local_window": 0}, "local_window is 0; allowed: an integer from 1"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        make_spec(**changes)


def test_a_written_config_says_which_blocks_share_and_reads_back_the_same() -> None:
    spec = make_spec("shared unevenly")
    assert spec.config["share_groups"] == [3, 1]
    assert read_model_spec(spec.to_config()) == spec


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("headroom-")])
def test_our_presets_take_the_bundled_vocabulary(name: str) -> None:
    assert PRESETS[name].spec.vocab_size == 4_096
