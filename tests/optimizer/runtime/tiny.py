"""Models, plans and token files small enough for unit tests."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.data.token_file import FORMAT_VERSION, TOKENS_FILE, TokenFile, TokenManifest, write_manifest
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.export.place import ARTIFACTS_FOLDER, fence_of_artifacts
from optimizer.workload import TrainingWorkload

VOCAB_SIZE = 512
NUM_BLOCKS = 3

_LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": NUM_BLOCKS,
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 172,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {
    "llama": {"model_type": "llama", **_LLAMA_LIKE},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": NUM_BLOCKS,
        "n_head": 4,
        "vocab_size": VOCAB_SIZE,
        "n_positions": 256,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
    "gemma2": {"model_type": "gemma2", **_LLAMA_LIKE, "head_dim": 16, "sliding_window": 16},
    "mixtral": {
        "model_type": "mixtral",
        **_LLAMA_LIKE,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def make_spec(name: str = "llama") -> ModelSpec:
    return read_model_spec(CONFIGS[name])


def make_plan(
    *choices: BlockChoice,
    dtype: str = "fp32",
    bits: int = 32,
    micro_batch_size: int = 2,
    accumulation_steps: int = 1,
    gradients: str = "keep",
    state_place: str = "device",
    fraction: float = 1.0,
    weights_place: str = "device",
    prefetch: int = 1,
) -> Plan:
    """One choice stands for every block."""
    per_block = choices if len(choices) == NUM_BLOCKS else (choices or ("keep",)) * NUM_BLOCKS
    return Plan(
        batch=BatchPlan(micro_batch_size=micro_batch_size, accumulation_steps=accumulation_steps),
        weights=WeightsPlan(dtype=dtype, place=weights_place, prefetch=prefetch),
        gradients=GradientsPlan(choice=gradients),
        optimizer_state=OptimizerStatePlan(bits=bits, place=state_place, fraction=fraction),
        activations=ActivationsPlan(per_block=per_block),
    )


def make_workload(**changes: object) -> TrainingWorkload:
    values = {"sequence_length": 32, "global_batch_size": 2, "num_steps": 6, "learning_rate": 1e-3, **changes}
    return TrainingWorkload(**values)


def artifacts_of(job_folder: Path) -> Path:
    """The folder of what the job's latest attempt has left."""
    return max((job_folder / ARTIFACTS_FOLDER).iterdir(), key=lambda folder: fence_of_artifacts(folder) or -1)


def write_token_file(folder: Path, *, num_tokens: int = 4_000) -> Path:
    """Tokens that repeat with a pattern, so that a model can learn them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = (np.arange(num_tokens) * 7 % 61).astype("<u2")
    (folder / TOKENS_FILE).write_bytes(tokens.tobytes())
    manifest = TokenManifest(
        version=FORMAT_VERSION,
        dtype="uint16",
        num_tokens=num_tokens,
        num_documents=1,
        vocab_size=VOCAB_SIZE,
        end_of_text_id=0,
        dataset_sha256="0" * 64,
        tokenizer_sha256="0" * 64,
        tokenizer="own",
        tokens_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(),
    )
    write_manifest(folder, manifest)
    TokenFile.open(folder)
    return folder


def write_tokenizer(file: Path, *, num_letters: int = 256) -> Path:
    """A tokenizer of single letters and one end token, within the tiny vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())[:num_letters]
    vocabulary = {"<|endoftext|>": 0, **{letter: index + 1 for index, letter in enumerate(letters)}}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(file))
    return file
