"""Compiled blocks: losses are those op by op but for rounding, and one graph serves each kind of block."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.base.errors import BlockNotCompiled
from optimizer.models.anatomy import find_blocks
from optimizer.models.build import build_model
from optimizer.models.spec import read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice, BlockKernels, KernelsPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.compiled import graph as graphs
from optimizer.runtime.compiled.blocks import CompiledBlocks
from optimizer.runtime.job.measure import hash_weights, make_synthetic_batches
from optimizer.runtime.job.prepare import prepare_model
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import Adapter, TrainingWorkload
from tests.breadth import COMPILED_BLOCKS
from tests.optimizer.models.small_configs import SMALL_CONFIGS
from tests.optimizer.runtime.tiny import NUM_BLOCKS, make_plan, make_spec

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
NUM_STEPS = 5
NEAR = 1e-5
"""Sums in another order: fp32 has 2^-24 for each number, and a step's loss is a mean over many."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each graph that is compiled, by the block's class."""
    made: list[str] = []
    compile_graph = graphs.Graph.__init__

    def note(graph: graphs.Graph, block: nn.Module, *rest: Any) -> None:
        made.append(type(block).__name__)
        compile_graph(graph, block, *rest)

    monkeypatch.setattr(graphs.Graph, "__init__", note)
    return made


@functools.cache
def train(
    kernels: BlockKernels,
    choice: BlockChoice = "keep",
    *,
    name: str = "llama",
    on_step: Callable[[int], None] | None = None,
    device: torch.device = CPU,
) -> tuple[list[float], str]:
    """Losses of a few steps, and the hash of the weights after them."""
    torch.manual_seed(0)
    model = build_model(make_spec(name), device=device)
    plan = plan_of(kernels, choice)
    workload = TrainingWorkload(sequence_length=16, global_batch_size=plan.batch.global_batch_size)
    meter = Meter(device=device)
    trainer = Trainer(model, plan=plan, workload=workload, device=device, meter=meter)
    losses = []
    for index in range(NUM_STEPS):
        batches = make_synthetic_batches(model, plan=plan, workload=replace(workload, seed=index))
        losses.append(trainer.step(batches, learning_rate=1e-3).loss)
        if on_step is not None:
            on_step(index)
    hashed = hash_weights(trainer)
    trainer.close()
    return losses, hashed


def plan_of(kernels: BlockKernels, choice: BlockChoice = "keep") -> Plan:
    plan = make_plan()
    activations = ActivationsPlan(per_block=(choice,) * NUM_BLOCKS)
    return replace(plan, activations=activations, kernels=KernelsPlan(blocks=kernels))


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_losses_are_those_op_by_op_but_for_rounding() -> None:
    compiled, _ = train("compiled", "keep")
    op_by_op, _ = train("memory_saving")
    assert compiled == pytest.approx(op_by_op, abs=NEAR)


@pytest.mark.breadth(COMPILED_BLOCKS)
@pytest.mark.parametrize("choice", ["recompute", "offload"])
def test_recomputed_and_offloaded_blocks_train_to_the_bits_of_kept_ones(choice: BlockChoice) -> None:
    assert train("compiled", choice) == train("compiled", "keep")


# Twins: the two tests above
@pytest.mark.gpu
@pytest.mark.usefixtures("prepared_card")
def test_compiled_blocks_on_a_card_train_as_op_by_op_and_moved_ones_to_the_bits_of_kept_ones() -> None:
    kept = train("compiled", "keep", device=CUDA)
    op_by_op, _ = train("memory_saving", device=CUDA)
    # A card's exp and rsqrt differ in their last bits too, between a fused kernel and torch's own.
    assert kept[0] == pytest.approx(op_by_op, abs=10 * NEAR)
    for choice in ("recompute", "offload"):
        assert train("compiled", choice, device=CUDA) == kept, choice


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_code_inside_of_torchs_copying_of_inputs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callable that torch leaves for a card, whose kernels assume where inputs begin."""
    with graphs._compiling():  # silent where torch warns of itself at its first import
        from torch._inductor import compile_fx
        from torch._inductor.utils import align_inputs_from_check_idxs
        from torch.utils._ordered_set import OrderedSet

    compile_inner = compile_fx.compile_fx_inner
    wrapped: list[Any] = []

    def wrap(*args: Any, **options: Any) -> Any:
        output: Any = compile_inner(*args, **options)
        output.current_callable = align_inputs_from_check_idxs(output.current_callable, [0], OrderedSet())
        wrapped.append(output.current_callable)
        return output

    monkeypatch.setattr(compile_fx, "compile_fx_inner", wrap)
    block = nn.Sequential(nn.Linear(3, 5), nn.GELU())
    expected = block(torch.ones(2, 3))
    compiled = CompiledBlocks([block])
    torch.testing.assert_close(block(torch.ones(2, 3)), expected)
    compiled.close()
    assert wrapped[0].__globals__["__name__"] == "torch._inductor.utils"


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_all_blocks_of_a_kind_share_one_graph_and_no_step_compiles_another(counted: list[str]) -> None:
    seen = []
    train("compiled", on_step=lambda _: seen.append(len(counted)))
    assert seen == [1] * NUM_STEPS


@pytest.mark.breadth(COMPILED_BLOCKS)
@pytest.mark.parametrize("form", ["same", "int8"])
def test_blocks_with_adapters_share_a_graph_too_unless_their_plain_values_differ(form: Any) -> None:
    model: Any = build_model(make_spec())
    prepare_model(model, weights=WeightsPlan(frozen=form), workload=TrainingWorkload(adapter=Adapter(rank=2)))
    model.get_input_embeddings().requires_grad_()  # else the first block is given another layout: an input without a gradient
    blocks: Any = find_blocks(model)
    for block in blocks:
        nn.init.normal_(block.self_attn.q_proj.lora_B["default"].weight)
    blocks[-1].self_attn.q_proj.scaling["default"] *= 2
    expected = losses_of(model)
    compiled = CompiledBlocks(blocks)
    assert losses_of(model) == pytest.approx(expected, abs=NEAR)
    assert compiled.num_graphs == 2
    compiled.close()


@pytest.mark.breadth(COMPILED_BLOCKS)
@pytest.mark.parametrize("name", ["gemma2", "falcon"])
def test_blocks_with_code_of_their_own_are_captured(name: str) -> None:
    """Gemma 2 attends by an op of ours; Falcon's Python writes a tensor down, which backward's code needs, too."""
    # a single block: Gemma 2's second has another window, and so would have a graph of its own
    model = build_model(read_model_spec({**SMALL_CONFIGS[name], "num_hidden_layers": 1}))
    prepare_model(model, weights=WeightsPlan(), workload=TrainingWorkload())
    expected, gradients = losses_of(model), take_gradients(model)
    compiled = CompiledBlocks(find_blocks(model))
    assert losses_of(model) == pytest.approx(expected, abs=NEAR)
    torch.testing.assert_close(take_gradients(model), gradients, atol=NEAR, rtol=1e-3)
    compiled.close()


def take_gradients(model: nn.Module) -> list[torch.Tensor]:
    taken = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return taken


def losses_of(model: Any) -> list[float]:
    """One sum of what each of two rows leads to, with a backward."""
    sums = [model(torch.full((1, 8), token)).logits.square().mean() for token in (3, 5)]
    torch.stack(sums).sum().backward()
    return [each.item() for each in sums]


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_dropout_draws_the_same_numbers_when_a_block_runs_again() -> None:
    assert train("compiled", "recompute", name="gpt2") == train("compiled", "keep", name="gpt2")


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_other_shapes_get_a_graph_of_their_own() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    compiled = CompiledBlocks([block])
    for length, num_graphs in ((8, 1), (12, 2), (8, 2)):
        given = torch.ones(1, length, 4)
        found = block(given)
        torch.testing.assert_close(found, nn.functional.gelu(block[0](given)))
        found.sum().backward()
        assert compiled.num_graphs == num_graphs
    compiled.close()
    assert not [name for name, module in block.named_modules() if "forward" in vars(module)]


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_without_gradients_the_models_own_code_runs(counted: list[str]) -> None:
    model = build_model(make_spec())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        compiled = CompiledBlocks(find_blocks(model))
        assert torch.equal(model(ids).logits, before)
    compiled.close()
    assert not counted


class Undecided(nn.Module):
    """Decides by its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = self.linear(hidden_states)
        return doubled * 2 if doubled.sum() > 0 else doubled


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_a_block_that_decides_by_its_numbers_is_refused_by_name() -> None:
    block = Undecided()
    compiled = CompiledBlocks([block])
    said = "the plan compiles the model's blocks, and Undecided cannot be compiled: "
    with pytest.raises(BlockNotCompiled, match=said) as caught:
        block(torch.ones(2, 4))
    compiled.close()
    assert "kernels.blocks=memory_saving" in caught.value.hint


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_an_argument_that_is_no_plain_value_is_refused_by_name() -> None:
    block = nn.Linear(4, 4)
    compiled = CompiledBlocks([block])
    with pytest.raises(BlockNotCompiled, match="it is given object, which is no tensor and no plain value"):
        block(object())
    compiled.close()


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_without_a_compiler_the_error_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.SETTINGS, "cpp.cxx", ("no-such-compiler",))
    block = nn.Sequential(nn.Linear(3, 5), nn.GELU())
    compiled = CompiledBlocks([block])
    with pytest.raises(BlockNotCompiled, match="Sequential cannot be compiled: .*[Cc]ompiler") as caught:
        block(torch.ones(2, 3))
    compiled.close()
    assert "C++ compiler (g++)" in caught.value.hint


@pytest.mark.breadth(COMPILED_BLOCKS)
def test_a_broken_kernel_in_the_cache_is_compiled_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was killed as it wrote a library leaves half of one."""
    from torch._inductor import compile_fx

    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    compile_inner = compile_fx.compile_fx_inner
    folders: list[str] = []

    def break_first(*args: Any, **options: Any) -> Any:
        folders.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        if len(folders) == 1:
            raise ImportError("cabc.main.so: file too short")
        return compile_inner(*args, **options)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", break_first)
    block = nn.Sequential(nn.Linear(3, 5), nn.GELU())
    expected = block(torch.ones(2, 3))
    compiled = CompiledBlocks([block])
    torch.testing.assert_close(block(torch.ones(2, 3)), expected)
    compiled.close()
    kept = tmp_path / "cache" / "compiled"
    assert folders[0] == str(kept)
    assert list(kept.glob("again-*")) == [Path(folders[1])]
