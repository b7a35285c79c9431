"""Losses of a chat fine-tune beside those of TRL's ``SFTTrainer``: same chats, weights, hyperparameters, step by step, in fp32.

Answers alone are learnt, each chat has a row of its own, two micro-batches make a step: the mean is over the tokens that count
in all of them. The bundled model's template has no ``{% generation %}``, by which TRL finds answers; it is given the same
template with that mark. Chats come in our order. Needs trl.
"""

import importlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.parts import Options, Part
from benchmarks.common.record import GoalEntry, Row, at_most, clear, goal
from benchmarks.fine_tune.chats import TYPES, Chat, make_spec, read_chats, tokenize_chats
from optimizer.data.samples.rows import SampleRows, open_batches
from optimizer.goal import Goal
from optimizer.models.build import build_model
from optimizer.models.bundled import CHAT_MODEL_FOLDER
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.plan import Plan
from optimizer.runtime.job.train import train
from optimizer.runtime.job.training_run import TrainingRun
from optimizer.workload import TrainingWorkload

NAME = "losses"
LIMIT = 1e-5
MICRO_BATCH, ACCUMULATION = 2, 2
KEPT: tuple[BlockChoice, ...] = ("keep",)
MARKED_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def measure_losses(options: Options) -> Iterator[Row]:
    """A row for each model type. ``--of``: types."""
    for model_type in TYPES[:2] if options.quick else TYPES:
        if options.wants(model_type):
            with tempfile.TemporaryDirectory(prefix="headroom-losses-") as folder:
                yield {"part": NAME, "model_type": model_type, **_compare(make_spec(model_type), Path(folder), options.seed)}
            clear()


def _compare(spec: ModelSpec, folder: Path, seed: int) -> Row:
    workload = TrainingWorkload(
        sequence_length=256,
        packing="off",
        loss_on="assistant",
        global_batch_size=MICRO_BATCH * ACCUMULATION,
        num_steps=6,
        schedule="constant",
        learning_rate=1e-3,
        eval_batches=1,
        eval_every_steps=0,
        checkpoint_every_steps=0,
        sample_tokens=0,
        seed=seed,
    )
    chats = read_chats(48)
    tokens = tokenize_chats(chats, folder)
    rows = open_batches(tokens, workload)
    assert isinstance(rows, SampleRows)
    order = [
        rows.samples_of_row(index)[0]
        for step in range(workload.num_steps)
        for index in rows.train_sequence_indices(step, workload.global_batch_size).tolist()
    ]
    ours = _our_losses(spec, workload, tokens.folder, folder)
    theirs = _their_losses(spec, workload, [chats[index] for index in order], folder)
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "losses": ours,
        "trl_losses": theirs,
        "largest_difference": max(differences),
        "trl": importlib.import_module("trl").__version__,
        "transformers": importlib.import_module("transformers").__version__,
    }


def _our_losses(spec: ModelSpec, workload: TrainingWorkload, tokens: Path, folder: Path) -> list[float]:
    plan = Plan(
        batch=BatchPlan(micro_batch_size=MICRO_BATCH, accumulation_steps=ACCUMULATION),
        activations=ActivationsPlan(per_block=KEPT * spec.num_blocks),
    )
    run = TrainingRun(
        spec=spec,
        plan=plan,
        workload=workload,
        goal=Goal(device_budget_bytes=2**40),
        device="cpu",
        attempt=1,
        fence=1,
        job_folder=folder / "job",
        weights_folder=None,
        token_file=tokens,
        tokenizer_file=CHAT_MODEL_FOLDER / "tokenizer.json",
    )
    messages: list[dict[str, Any]] = []
    train(run, report=messages.append, should_stop=lambda: False)
    return [message["loss"] for message in messages if message.get("kind") == "step"]


def _their_losses(spec: ModelSpec, workload: TrainingWorkload, chats: Sequence[Chat], folder: Path) -> list[float]:
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHAT_MODEL_FOLDER)
    tokenizer.chat_template = MARKED_TEMPLATE
    losses: list[float] = []

    class Recorded(trl.SFTTrainer):  # type: ignore[misc]
        """Keeps each micro-batch's loss as it is; the log rounds it."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    trainer = Recorded(
        model=build_model(spec, seed=workload.seed),
        args=_arguments(trl, workload, folder),
        train_dataset=datasets.Dataset.from_list(list(chats)),
        processing_class=tokenizer,
    )
    trainer.train()
    return [sum(losses[at : at + ACCUMULATION]) for at in range(0, len(losses), ACCUMULATION)]


def _arguments(trl: Any, workload: TrainingWorkload, folder: Path) -> Any:
    return trl.SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        packing=False,
        max_length=workload.sequence_length + 1,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=workload.num_steps,
        train_sampling_strategy="sequential",
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        adam_beta1=workload.beta1,
        adam_beta2=workload.beta2,
        adam_epsilon=workload.epsilon,
        weight_decay=workload.weight_decay,
        max_grad_norm=workload.max_grad_norm,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        router_aux_loss_coef=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        seed=0,
    )


def summarize_losses(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    found = [row for row in rows if "largest_difference" in row]
    worst = max((row["largest_difference"] for row in found), default=None)
    return {
        "largest difference of a step's loss from SFTTrainer's": at_most(worst, LIMIT),
        "model types compared": goal(len(found) or None, f">= {len(TYPES)}", met=len(found) >= len(TYPES), needs="all cases"),
    }


PART = Part(name=NAME, measure=measure_losses, summarize=summarize_losses, case="model_type")
