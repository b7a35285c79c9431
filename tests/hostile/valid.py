"""Small valid files of every kind that can be uploaded: what hostile ones are made of."""

import io
import json
import struct
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from tests.hostile.upload import Part, Upload

CONFIG: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 96, "max_position_embeddings": 128, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4},
        "merges": ["a b"],
    },
}
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
TOKENIZER_CONFIG: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
GENERATION_CONFIG: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "eos_token_id": [1, 2]}
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "wte.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "wpe.weight": {"dtype": "BF16", "shape": [3], "data_offsets": [32, 38]},
}
DATA = bytes(38)
INDEX: dict[str, Any] = {
    "metadata": {"total_size": 64},
    "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
}
CHAT_ROW: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
ROWS: list[dict[str, Any]] = [{"text": "In the beginning"}, {"text": "was the word"}]
PROMPTS: list[dict[str, Any]] = [
    {"prompt": "Who?", "max_new_tokens": 4, "temperature": 0.5},
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    },
]


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def safetensors(header: Any = HEADER, data: bytes = DATA, *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else as_json(header)
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def shard(name: str, *, num_bytes: int = 32) -> bytes:
    return safetensors({name: {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}}, bytes(num_bytes))


def model(*parts: Part, config: Any = CONFIG) -> Upload:
    return (Part(field="config", name="config.json", content=config if isinstance(config, bytes) else as_json(config)), *parts)


def weights(content: bytes, name: str = "model.safetensors") -> Part:
    return Part(field="weights", name=name, content=content)


def beside(name: str, content: bytes) -> Part:
    return Part(field="files", name=name, content=content)


def tokenizer(document: Any) -> Part:
    content = document if isinstance(document, bytes) else as_json(document)
    return Part(field="tokenizer", name="tokenizer.json", content=content)


def tokenizer_config(document: Any) -> Part:
    content = document if isinstance(document, bytes) else as_json(document)
    return Part(field="tokenizer_config", name="tokenizer_config.json", content=content)


def sharded(index: Any = INDEX, first: bytes = shard("a"), second: bytes = shard("b")) -> Upload:
    return model(
        weights(index if isinstance(index, bytes) else as_json(index), "model.safetensors.index.json"),
        weights(first, "model-00001-of-00002.safetensors"),
        weights(second, "model-00002-of-00002.safetensors"),
    )


def dataset(name: str, content: bytes) -> Upload:
    return (Part(field="file", name=name, content=content),)


def prompts(content: bytes) -> Upload:
    return (Part(field="prompts", name="prompts.jsonl", content=content),)


def lines(*rows: Any) -> bytes:
    return b"".join(as_json(row) + b"\n" for row in rows)


def parquet_file(columns: dict[str, Any] | pa.Table, **options: Any) -> bytes:
    out = io.BytesIO()
    parquet.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), out, **options)
    return out.getvalue()


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(*, version: int = 3, num_tensors: int = 1, entries: int | None = None, tail: bytes = b"") -> bytes:
    """A header with a llama's numbers and one tensor."""
    numbers = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 32}
    numbers |= {"attention.head_count": 1, "attention.head_count_kv": 1}
    pairs = [gguf_string("general.architecture") + struct.pack("<I", 8) + gguf_string("llama")]
    pairs += [gguf_string(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()]
    epsilon = struct.pack("<If", 6, 1e-5)
    pairs.append(gguf_string("llama.attention.layer_norm_rms_epsilon") + epsilon)
    tokens = b"".join(gguf_string(f"t{index}") for index in range(4))
    pairs.append(gguf_string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 4) + tokens)
    count = len(pairs) if entries is None else entries
    info = gguf_string("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, count) + b"".join(pairs) + info * min(num_tensors, 4)
    return head + bytes(-len(head) % 32) + (tail or bytes(8 * 4 * 4))


VALID: dict[str, Upload] = {
    "config": model(),
    "llama": model(config=LLAMA),
    "weights": model(weights(safetensors())),
    "shards": sharded(),
    "tokenizer": model(tokenizer(TOKENIZER)),
    "templates": model(
        tokenizer_config(TOKENIZER_CONFIG),
        beside("chat_template.jinja", TEMPLATE.encode()),
        beside("tools.jinja", TEMPLATE.encode()),
    ),
    "generation": model(beside("generation_config.json", as_json(GENERATION_CONFIG))),
    "txt": dataset("words.txt", b"In the beginning.\n\n\nWas the word.\n"),
    "jsonl": dataset("rows.jsonl", lines(*ROWS)),
    "chats": dataset("chats.jsonl", lines(CHAT_ROW, CHAT_ROW)),
    "json": dataset("rows.json", as_json(ROWS)),
    "csv": dataset("rows.csv", b'prompt,completion\n"a, b",c\nd,e\n'),
    "parquet": dataset("rows.parquet", parquet_file({"text": ["one", "two", "three"]})),
    "nested parquet": dataset("rows.parquet", parquet_file({"messages": [CHAT_ROW["messages"]] * 3}, compression="zstd")),
    "prompts": prompts(lines(*PROMPTS)),
}
"""By kind, an upload that is allowed."""
