import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import DiskFull, InvalidPlan, RemoteStoreFull, RemoteStoreLost
from optimizer.base.units import KIB
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.plan.activations import ActivationsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.activations import apply_activations
from optimizer.runtime.step.step import Trainer
from optimizer.runtime.tiers.tiers import Tiers
from tests.optimizer.runtime.tiers.test_disk import largest_file
from tests.optimizer.runtime.tiny import NUM_BLOCKS, make_plan, make_spec, make_workload
from tests.valkey import Valkey

CPU = torch.device("cpu")
MIXED = ("offload", "keep", "recompute")


def run_steps(
    name: str, choices: tuple[str, ...], *, num_steps: int = 2, compress: str = "none"
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor], Trainer]:
    """Losses, the last gradients and the weights after some steps from the same start."""
    model = build_model(make_spec(name), seed=3)
    plan, workload = make_plan(*choices, accumulation_steps=2), make_workload(global_batch_size=4)
    activations = dataclasses.replace(plan.activations, compress=compress)
    plan = dataclasses.replace(plan, activations=activations)
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=Meter(device=CPU))
    torch.manual_seed(5)
    losses = []
    gradients = {}
    trainer.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = None
        batches = make_synthetic_batches(model, plan=plan, workload=workload)
        losses.append(trainer.step(batches, learning_rate=1e-3).loss)
        gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    trainer.close()
    return losses, gradients, {key: parameter.detach() for key, parameter in model.named_parameters()}, trainer


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_recompute_and_offload_give_the_bits_of_keep(name: str) -> None:
    losses, gradients, weights, _ = run_steps(name, ("keep",))
    for choices in (("recompute",), ("offload",), MIXED):
        other_losses, other_gradients, other_weights, _ = run_steps(name, choices)
        assert other_losses == losses, choices
        for key in weights:
            assert torch.equal(other_gradients[key], gradients[key]), (choices, key)
            assert torch.equal(other_weights[key], weights[key]), (choices, key)


@pytest.mark.breadth
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_offloading_to_the_disk_and_to_a_remote_store_gives_the_bits_of_keep(remote: Valkey, name: str) -> None:
    losses, gradients, weights, _ = run_steps(name, ("keep",))
    for choices in (("offload_disk",), ("offload_remote",), ("offload_disk", "offload", "offload_remote")):
        other_losses, other_gradients, other_weights, trainer = run_steps(name, choices)
        assert other_losses == losses, choices
        assert trainer.tiers.copied_bytes["disk_to_host"] + trainer.tiers.copied_bytes["remote_to_host"] > 0
        for key in weights:
            assert torch.equal(other_gradients[key], gradients[key]), (choices, key)
            assert torch.equal(other_weights[key], weights[key]), (choices, key)


@pytest.mark.parametrize(
    "choices",
    [
        ("offload_disk", "recompute", "offload_remote"),
        ("keep", "offload_disk", "recompute"),
        ("offload_remote", "offload_remote", "keep"),
        ("recompute", "offload", "offload_disk"),
    ],
    ids="-".join,
)
def test_places_mix_with_keeping_and_recomputing(remote: Valkey, choices: tuple[str, ...]) -> None:
    losses, gradients, _, _ = run_steps("gpt2", ("keep",))
    other_losses, other_gradients, _, _ = run_steps("gpt2", choices)
    assert other_losses == losses
    assert all(torch.equal(other_gradients[key], gradients[key]) for key in gradients)


@pytest.mark.breadth
@pytest.mark.parametrize("choice", ["offload", "offload_disk", "offload_remote"])
@pytest.mark.parametrize(("compress", "bound"), [("bf16", 0.01), ("int8", 0.1)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_compressed_trips_leave_the_loss_and_keep_gradients_within_their_bound(
    remote: Valkey, name: str, choice: str, compress: str, bound: float
) -> None:
    losses, gradients, _, _ = run_steps(name, ("keep",), num_steps=1)
    other_losses, other_gradients, _, _ = run_steps(name, (choice,), num_steps=1, compress=compress)
    assert other_losses == losses
    error, norm = (
        torch.stack([tensor.norm() for tensor in tensors]).norm()
        for tensors in ([other_gradients[key] - gradients[key] for key in gradients], gradients.values())
    )
    assert 0 < error < bound * norm


@pytest.mark.parametrize("compress", ["none", "bf16", "int8"])
@pytest.mark.parametrize("choice", ["offload", "offload_disk", "offload_remote"])
def test_what_goes_out_comes_back_over_every_link(remote: Valkey, choice: str, compress: str) -> None:
    _, _, _, trainer = run_steps("gpt2", (choice,), num_steps=1, compress=compress)
    copied = trainer.tiers.copied_bytes
    assert copied["device_to_host"] == copied["host_to_device"] > 0
    stored = {"offload": 0, "offload_disk": copied["host_to_disk"], "offload_remote": copied["host_to_remote"]}[choice]
    assert copied["host_to_disk"] == copied["disk_to_host"]
    assert copied["host_to_remote"] == copied["remote_to_host"]
    assert stored == (0 if choice == "offload" else copied["device_to_host"])


def test_after_backward_the_stores_hold_nothing_and_after_closing_no_trace_is_left(remote: Valkey) -> None:
    _, _, _, trainer = run_steps("llama", ("offload_disk", "offload_remote", "offload"))
    assert remote.list_keys() == []
    assert (trainer.tiers.disk_bytes, trainer.tiers.remote_bytes) == (0, 0)


def test_the_order_of_backward_is_learnt_in_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(Tiers, "prefetch", lambda self, copies: asked.append(list(copies)))
    fetched = []
    fetch = Tiers.fetch
    monkeypatch.setattr(
        Tiers, "fetch", lambda self, copy, **options: (fetched.append(copy), fetch(self, copy, **options))[1]
    )
    run_steps("llama", ("offload_disk", "keep", "keep"), num_steps=1)
    # Two micro-batches: the second asks for all in the order in which the first came to them.
    first, second = (len(copies) for copies in asked)
    assert first == second == len(fetched) // 2
    assert asked[1] == fetched[len(fetched) // 2 :]
    assert asked[0] != fetched[: len(fetched) // 2]


@pytest.mark.parametrize("choices", [("offload",) * 3, ("offload_disk",) * 3, ("offload", "keep", "offload_disk")])
def test_micro_batches_that_are_under_way_together_each_get_back_what_they_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, choices: tuple[str, ...]
) -> None:
    asked: list[list[int]] = []
    prefetch = Tiers.prefetch

    def watch(tiers: Tiers, copies: list[Any]) -> None:
        asked.append([id(copy) for copy in copies])
        prefetch(tiers, copies)

    monkeypatch.setattr(Tiers, "prefetch", watch)
    expected = _gradients_of_two(("keep",) * 3, tmp_path, are_together=False)
    assert all(torch.equal(*pair) for pair in zip(_gradients_of_two(choices, tmp_path, are_together=True), expected, strict=True))
    # Nothing that one micro-batch moved is asked for in the backward of the other.
    first, second = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    assert not {copy for copies in first for copy in copies} & {copy for copies in second for copy in copies}


def _gradients_of_two(choices: tuple[str, ...], folder: Path, *, are_together: bool) -> list[torch.Tensor]:
    """Gradients of two micro-batches: forward and backward of one and then of the other, or forward of both first."""
    model = build_model(make_spec(), seed=3)
    tiers = Tiers(device=CPU, meter=None, scratch=folder)
    undo = apply_activations(find_blocks(model), ActivationsPlan(per_block=choices), tiers)
    torch.manual_seed(7)
    losses = []
    for _ in range(2):
        tokens = torch.randint(0, 512, (1, 16))
        loss = model(input_ids=tokens).logits.float().square().mean()
        losses.append(loss)
        if not are_together:
            loss.backward()
    if are_together:
        for loss in losses:
            loss.backward()
    undo()
    tiers.close()
    return [parameter.grad for parameter in model.parameters()]


def test_a_full_disk_stops_a_step_by_its_name_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = build_model(make_spec(), seed=3)
    plan, workload = make_plan("offload_disk"), make_workload()
    trainer = Trainer(
        model, plan=plan, workload=workload, device=CPU, meter=Meter(device=CPU), scratch=tmp_path / "scratch"
    )
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with largest_file(64 * KIB), pytest.raises(DiskFull, match="the disk of the scratch folder"):
        trainer.step(batches, learning_rate=1e-3)
    trainer.close()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), before, strict=True))


def test_a_full_store_stops_a_step_by_its_name_and_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Valkey()
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 100 * KIB)
    monkeypatch.setenv("HEADROOM_REMOTE_URL", server.url)
    model = build_model(make_spec(), seed=3)
    plan, workload = make_plan("offload_remote"), make_workload()
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=Meter(device=CPU))
    batches = make_synthetic_batches(model, plan=plan, workload=workload)
    with pytest.raises(RemoteStoreFull, match="is full"):
        trainer.step(batches, learning_rate=1e-3)
    trainer.close()
    assert server.list_keys() == []
    server.close()


def test_a_missing_store_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADROOM_REMOTE_URL", raising=False)
    model = build_model(make_spec())
    plan = make_plan("offload_remote", "keep", "keep")
    with pytest.raises(RemoteStoreLost, match="HEADROOM_REMOTE_URL is not set"):
        Trainer(model, plan=plan, workload=make_workload(), device=CPU, meter=None)


def test_dropout_is_on_in_the_comparison() -> None:
    torch.manual_seed(0)
    model = build_model(make_spec("gpt2"))
    ids = torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_offload_moves_each_storage_out_and_back_once() -> None:
    _, _, _, trainer = run_steps("llama", ("offload",), num_steps=1)
    assert trainer.tiers.copied_bytes["device_to_host"] > 0
    assert trainer.tiers.copied_bytes["host_to_device"] == trainer.tiers.copied_bytes["device_to_host"]


def test_after_backward_nothing_is_left_on_the_host() -> None:
    _, _, _, trainer = run_steps("gpt2", MIXED)
    gc.collect()
    assert trainer.meter.host_bytes == 0


def test_an_offloaded_block_leaves_nothing_of_its_own_on_the_device() -> None:
    kept, offloaded = (_activation_bytes_after_forward(choice) for choice in ("keep", "offload"))
    assert offloaded["host"] > 0
    # The host holds the bytes that left the device.
    assert kept["device"] - offloaded["device"] == offloaded["host"]


def test_a_recomputed_block_leaves_only_its_input() -> None:
    left = _activation_bytes_after_forward("recompute")
    hidden_bytes = 2 * 32 * 64 * 4
    inputs_bytes = NUM_BLOCKS * hidden_bytes
    # Beside them: the final norm's own saved tensors, and the position embeddings that all blocks share.
    rest_bytes = left["device"] - inputs_bytes
    assert 0 < rest_bytes < 4 * hidden_bytes


def test_a_storage_saved_through_several_views_is_copied_once() -> None:
    block = _Views()
    tiers = Tiers(device=CPU, meter=None)
    undo = apply_activations([block], ActivationsPlan(per_block=("offload",)), tiers)
    hidden = torch.randn(4, 8, requires_grad=True)
    block(hidden).sum().backward()
    undo()
    expected = torch.autograd.grad(block(hidden).sum(), hidden)[0]
    assert torch.equal(hidden.grad, expected)
    product_bytes = hidden.nbytes
    assert tiers.copied_bytes["device_to_host"] == product_bytes


def test_a_tensor_written_to_after_it_was_saved_is_copied_as_it_was() -> None:
    block = _InPlace()
    tiers = Tiers(device=CPU, meter=None)
    apply_activations([block], ActivationsPlan(per_block=("offload",)), tiers)
    hidden = torch.ones(4, requires_grad=True)
    block(hidden).sum().backward()
    # With e = exp(1): e + e from the product before the doubling; 2e from the product after, whose path through exp gives e.
    assert torch.allclose(hidden.grad, torch.exp(torch.ones(4)) * 5)


def test_without_gradients_nothing_is_moved_or_recomputed() -> None:
    model = build_model(make_spec())
    tiers = Tiers(device=CPU, meter=None)
    apply_activations(find_blocks(model), ActivationsPlan(per_block=MIXED), tiers)
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long))
    assert tiers.copied_bytes["device_to_host"] == 0


def test_keep_wraps_nothing_and_undo_leaves_the_blocks_as_they_were() -> None:
    blocks = find_blocks(build_model(make_spec()))
    apply_activations(blocks, make_plan("keep").activations, Tiers(device=CPU))
    assert all("forward" not in vars(block) for block in blocks)
    undo = apply_activations(blocks, ActivationsPlan(per_block=MIXED), Tiers(device=CPU))
    assert ["forward" in vars(block) for block in blocks] == [True, False, True]
    undo()
    assert all("forward" not in vars(block) for block in blocks)


def test_a_plan_of_another_depth_is_refused() -> None:
    blocks = find_blocks(build_model(make_spec()))
    with pytest.raises(InvalidPlan, match="names 2 blocks; the model has 3"):
        apply_activations(blocks, ActivationsPlan(per_block=("keep", "keep")), Tiers(device=CPU))


def _activation_bytes_after_forward(choice: str) -> dict[str, int]:
    model = build_model(make_spec())
    meter = Meter(device=CPU)
    plan, workload = make_plan(choice), make_workload()
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=meter)
    ((ids, labels),) = make_synthetic_batches(model, plan=plan, workload=workload)
    with trainer.metered():
        loss = trainer.forward.compute_loss(ids, labels)
    sizes = {
        "device": meter.bytes_by_category()["activations"],
        "host": meter.bytes_by_category(tier="host")["activations"],
    }
    del loss
    return sizes


class _Views(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        doubled = hidden * 2
        left, right = doubled.chunk(2, dim=1)
        return left * right


class _InPlace(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        grown = torch.exp(hidden)
        first = grown * hidden
        with torch.no_grad():
            grown.mul_(2)
        return first + grown * hidden
