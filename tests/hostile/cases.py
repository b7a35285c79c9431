"""Hostile uploads written by hand, and what the service says of each: words of a refusal, or nothing where it takes it."""

import json
import struct
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tests.hostile.upload import Part, Upload
from tests.hostile.valid import (
    CHAT_ROW,
    CONFIG,
    HEADER,
    INDEX,
    LLAMA,
    PROMPTS,
    TEMPLATE,
    TOKENIZER,
    VALID,
    as_json,
    beside,
    dataset,
    gguf,
    lines,
    model,
    parquet_file,
    prompts,
    safetensors,
    shard,
    sharded,
    tokenizer,
    tokenizer_config,
    weights,
)

BOMB = "could not be checked within the limits of memory and time"
ALLOWED = ""
"""The upload is harmless, and taken."""
_NESTED = b"[" * 100_000 + b"]" * 100_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """One upload and its answer."""

    name: str
    upload: Upload
    says: str
    """Part of the refusal; ALLOWED where there is none."""

    @property
    def is_bomb(self) -> bool:
        """Report whether only a limited process survives its check."""
        return self.says == BOMB


def hand_cases() -> list[Case]:
    """Made afresh, since some of them are large."""
    table = {
        **{f"valid {name}": (upload, ALLOWED) for name, upload in VALID.items()},
        **_configs(),
        **_headers(),
        **_weights_files(),
        **_indexes(),
        **_tokenizers(),
        **_beside(),
        **_ggufs(),
        **_texts(),
        **_rows(),
        **_parquets(),
        **_prompts(),
    }
    return [Case(name=name, upload=upload, says=says) for name, (upload, says) in table.items()]


Table = dict[str, tuple[Upload, str]]


def _configs() -> Table:
    def with_(**changes: Any) -> Upload:
        return model(config={**CONFIG, **changes})

    return {
        "config of no bytes": (model(config=b""), "config.json is not JSON"),
        "config of zeros": (model(config=bytes(1_000)), "config.json is not JSON"),
        "config in UTF-16": (model(config=json.dumps(CONFIG).encode("utf-16")), ALLOWED),
        "config that is a list": (model(config=[]), "config"),
        "config that is a text": (model(config="gpt2"), "config"),
        "config that is null": (model(config=None), "config"),
        "config nested deeply": (model(config=_NESTED), "config.json is not JSON"),
        "config nested deeply inside": (model(config=b'{"model_type": "gpt2", "x": ' + _NESTED + b"}"), "is not JSON"),
        "config too large": (model(config=b" " * (1 << 20) + as_json(CONFIG)), "allowed: at most 1,048,576"),
        "config with a key twice": (model(config=b'{"model_type": "gpt2", "model_type": "llama"}'), "'model_type' occurs twice"),
        "config with an inner key twice": (model(config=b'{"model_type": "gpt2", "a": {"b": 1, "b": 2}}'), "'b' occurs twice"),
        "config with an endless number": (model(config=b'{"model_type": "gpt2", "n_embd": ' + b"9" * 5_000 + b"}"), "not JSON"),
        "config with NaN": (model(config=json.dumps({**CONFIG, "n_embd": float("nan")}).encode()), "n_embd"),
        "config with half a character": (with_(model_type="\ud800"), "model_type"),
        "config with NUL in its type": (with_(model_type="gpt2\0"), "model_type"),
        "config of a path": (with_(model_type="../../etc/passwd"), "model_type"),
        "config with sizes below zero": (with_(n_embd=-32), "n_embd"),
        "config with sizes of nothing": (with_(n_layer=0), "n_layer"),
        "config with a huge vocabulary": (with_(vocab_size=10**18), "vocab_size"),
        "config with huge layers": (with_(n_layer=10**9), "n_layer"),
        "config with a size as a text": (with_(n_head="2"), "n_head"),
        "config with a size as true": (with_(n_head=True), "n_head"),
        "config with a size as a fraction": (with_(n_embd=32.5), "n_embd"),
        "config with code of its own": (with_(auto_map={"AutoModel": "evil.Model"}, trust_remote_code=True), ALLOWED),
        "config with an attention of a repository": (with_(_attn_implementation="evil/kernel"), ALLOWED),
        "config of a rope of no kind": (model(config={**LLAMA, "rope_scaling": {"rope_type": "evil", "factor": 2}}), "rope"),
        "config of a rope of nothing": (model(config={**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0}}), "factor"),
        "config of heads that do not divide": (model(config={**LLAMA, "num_key_value_heads": 3}), "num_key_value_heads"),
        "config packed by no method": (
            model(weights(safetensors()), config={**CONFIG, "quantization_config": {"quant_method": "evil"}}),
            "evil",
        ),
        "config packed by a list": (model(weights(safetensors()), config={**CONFIG, "quantization_config": [1]}), "quantization"),
        "no config": ((weights(safetensors()),), "config.json is missing"),
    }


def _headers() -> Table:
    entry = HEADER["wte.weight"]

    def header(document: Any, data: bytes = bytes(32)) -> Upload:
        return model(weights(safetensors(document, data)))

    def changed(**changes: Any) -> Upload:
        return header({"w": {**entry, **changes}})

    return {
        "header of no bytes": (model(weights(b"")), "weights file"),
        "header cut in its length": (model(weights(b"\x08\0\0")), "weights file"),
        "header longer than the file": (model(weights(safetensors(length=2**40))), "a header of"),
        "header of the largest length": (model(weights(safetensors(length=2**64 - 1))), "a header of"),
        "header of no length": (model(weights(safetensors(length=0))), "a header of"),
        "header too short by one": (model(weights(safetensors(length=len(as_json(HEADER)) - 1))), "JSON"),
        "header that is a list": (header([]), "not a JSON object"),
        "header that is empty": (header({}), "0 tensors"),
        "header with only metadata": (header({"__metadata__": {}}), "0 tensors"),
        "header nested deeply": (header(_NESTED), "JSON"),
        "header in Latin-1": (header(b'{"\xe4": 1}'), "JSON"),
        "header with a tensor twice": (
            header(b'{"w": ' + as_json(entry) + b', "w": ' + as_json(entry) + b"}"),
            "occurs twice",
        ),
        "header with a key of a tensor twice": (
            header(b'{"w": {"dtype": "F32", "dtype": "F64", "shape": [8], "data_offsets": [0, 32]}}'),
            "occurs twice",
        ),
        "header with NaN": (header(b'{"w": NaN}'), "NaN is not JSON"),
        "tensor of a path": (header({"../../w": entry}), "a tensor named"),
        "tensor of no name": (header({"": entry}), "a tensor named"),
        "tensor of a long name": (header({"w" * 257: entry}), "a tensor named"),
        "tensor of a name with NUL": (header({"w\0": entry}), "a tensor named"),
        "tensor of a name with a line": (header({"w\n": entry}), "a tensor named"),
        "tensor of no dtype": (changed(dtype="F33"), "dtype"),
        "tensor of a dtype in a list": (changed(dtype=["F32"]), "dtype"),
        "tensor of a shape below zero": (changed(shape=[-4, -2]), "shape"),
        "tensor of a shape of fractions": (changed(shape=[4.0, 2]), "shape"),
        "tensor of a shape of truths": (changed(shape=[True, 8]), "shape"),
        "tensor of a shape that overflows": (changed(shape=[2**62, 2**62]), "spans"),
        "tensor of a shape beyond 64 bits": (changed(shape=[2**64]), "shape"),
        "tensor of many dimensions": (changed(shape=[1] * 9), "shape"),
        "tensor of no dimensions": (header({"w": {**entry, "shape": [], "data_offsets": [0, 4]}}, bytes(4)), ALLOWED),
        "tensor of nothing": (
            header({"w": {**entry, "shape": [0], "data_offsets": [0, 0]}, "v": entry}),
            ALLOWED,
        ),
        "tensor that ends before it begins": (changed(data_offsets=[32, 0]), "data_offsets"),
        "tensor that begins before the data": (changed(data_offsets=[-8, 24]), "data_offsets"),
        "tensor of three offsets": (changed(data_offsets=[0, 32, 64]), "data_offsets"),
        "tensor with more keys": (changed(code="import os"), "has other keys"),
        "tensor that is a number": (header({"w": 1}), "has other keys"),
        "tensors that overlap": (header({"a": entry, "b": entry}), "without gap or overlap"),
        "tensors with a gap": (
            header({"a": {**entry, "shape": [1], "data_offsets": [0, 4]}, "b": {**entry, "shape": [1], "data_offsets": [8, 12]}}),
            "without gap or overlap",
        ),
        "data too short": (header({"w": entry}, bytes(31)), "bytes of data"),
        "data too long": (header({"w": entry}, bytes(33)), "bytes of data"),
        "metadata of numbers": (header({"__metadata__": {"a": 1}, "w": entry}), "__metadata__"),
        "metadata too long": (header({"__metadata__": {"a": "x" * 70_000}, "w": entry}), "__metadata__"),
        "metadata with half a character": (header({"__metadata__": {"a": "\ud800"}, "w": entry}), "__metadata__"),
        "metadata with half a character as a key": (header({"__metadata__": {"\udfff": "a"}, "w": entry}), "__metadata__"),
        "metadata that is a list": (header({"__metadata__": [], "w": entry}), "__metadata__"),
        "tensors without number": (header({f"t{index}": 0 for index in range(50_001)}), "tensors; allowed"),
    }


def _weights_files() -> Table:
    def named(name: str) -> Upload:
        return model(weights(safetensors(), name))

    shown = "weights file is named"
    return {
        "a pickle": (model(weights(b"\x80\x04\x95\x10")), "a pickle"),
        "a torch checkpoint": (model(weights(b"PK\x03\x04" + bytes(100))), "a zip archive or a torch checkpoint"),
        "a zip with a header before it": (model(weights(safetensors() + b"PK\x03\x04")), "bytes of data"),
        "a gzip archive": (model(weights(b"\x1f\x8b\x08" + bytes(100))), "a gzip archive"),
        "a numpy file": (model(weights(b"\x93NUMPY\x01\0")), "a numpy file"),
        "an HDF5 file": (model(weights(b"\x89HDF\r\n\x1a\n")), "an HDF5 file"),
        "a GGUF file under another name": (model(weights(gguf())), "a GGUF file"),
        "weights named as a pickle": (named("pytorch_model.bin"), shown),
        "weights named as an archive": (named("model.safetensors.zip"), shown),
        "weights of a hidden name": (named(".safetensors"), shown),
        "weights of a name with a line": (named("a\nb.safetensors"), shown),
        "weights of a name with NUL": (named("a\0b.safetensors"), shown),
        "weights of a name turned around": (named("a\u202esrotsnetefas.safetensors"), shown),
        "weights of a long name": (named("a" * 250 + ".safetensors"), shown),
        "weights of a name in another script": (named("модель.safetensors"), shown),
        "weights of a name with spaces": (named("my model.safetensors"), shown),
        "two weights of one name": (
            model(weights(shard("a"), "a.safetensors"), weights(shard("a"), "a.safetensors")),
            "two weights files are named a.safetensors",
        ),
        "two weights without an index": (
            model(weights(shard("a"), "a.safetensors"), weights(shard("b"), "b.safetensors")),
            "weights",
        ),
        "an index alone": (model(weights(as_json(INDEX), "model.safetensors.index.json")), "weights"),
    }


def _indexes() -> Table:
    def mapped(weight_map: Any) -> Upload:
        return sharded({"weight_map": weight_map})

    first = "model-00001-of-00002.safetensors"
    refused = "a plain *.safetensors file name"
    return {
        "index to the folder above": (mapped({"a": "../x.safetensors"}), refused),
        "index to the root": (mapped({"a": "/etc/passwd"}), refused),
        "index to a hidden file": (mapped({"a": ".x.safetensors"}), refused),
        "index with backslashes": (mapped({"a": "..\\x.safetensors"}), refused),
        "index with NUL": (mapped({"a": "x\0.safetensors"}), refused),
        "index to a pickle": (mapped({"a": "pytorch_model.bin"}), refused),
        "index of numbers": (mapped({"a": 1}), refused),
        "index to a file that is not there": (mapped({"a": "model-00003-of-00002.safetensors"}), "is not there"),
        "index without one of the files": (mapped({"a": first}), "does not name"),
        "index that places a tensor elsewhere": (
            mapped({"a": "model-00002-of-00002.safetensors", "b": first}),
            "places a in",
        ),
        "index with a tensor more": (mapped({**INDEX["weight_map"], "c": first}), "places c in"),
        "index of nothing": (mapped({}), "no weight_map"),
        "index of a list": (mapped([]), "no weight_map"),
        "index that is a list": (sharded([]), "not a JSON object"),
        "index nested deeply": (sharded(_NESTED), "JSON"),
        "index with a key twice": (sharded(b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'), "occurs twice"),
        "one tensor in both shards": (sharded(second=shard("a")), "is also in"),
        "a shard that is a pickle": (sharded(second=b"\x80\x05\x95"), "a pickle"),
        "a shard of no bytes": (sharded(second=b""), "weights file"),
    }


def _tokenizers() -> Table:
    def changed(**changes: Any) -> Upload:
        return model(tokenizer({**TOKENIZER, **changes}))

    def with_model(**changes: Any) -> Upload:
        return changed(model={**TOKENIZER["model"], **changes})

    refused = "tokenizer.json cannot be used"
    many = {f"t{index}": index for index in range(5_000)}
    return {
        "tokenizer of no bytes": (model(tokenizer(b"")), refused),
        "tokenizer that is a list": (model(tokenizer([])), refused),
        "tokenizer nested deeply": (model(tokenizer(_NESTED)), refused),
        "tokenizer of no model": (changed(model={"type": "Evil"}), refused),
        "tokenizer with a merge of nothing": (with_model(merges=["x y"]), refused),
        "tokenizer with merges of numbers": (with_model(merges=[1]), refused),
        "tokenizer with ids below zero": (with_model(vocab={"a": -1}), refused),
        "tokenizer with ids beyond 32 bits": (with_model(vocab={"a": 2**40}), refused),
        "tokenizer with more tokens than the model": (with_model(vocab=many, merges=[]), "the model's vocab_size is 300"),
        "tokenizer with a bad expression": (changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}}), refused),
        "tokenizer with an expression for each text": (
            changed(normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a"}),
            ALLOWED,
        ),
        "tokenizer with an unknown normalizer": (changed(normalizer={"type": "Evil"}), refused),
        "tokenizer that doubles a text at each step": (
            changed(
                normalizer={
                    "type": "Sequence",
                    "normalizers": [{"type": "Replace", "pattern": {"String": " "}, "content": "  "}] * 40,
                }
            ),
            BOMB,
        ),
        "tokenizer too large": (model(tokenizer(b" " * 50_000_001)), "allowed: at most 50,000,000"),
    }


def _beside() -> Table:
    jinja = "chat_template.jinja"
    return {
        "template with code": (model(beside(jinja, b"{{ ''.__class__.__mro__[1].__subclasses__() }}")), ALLOWED),
        "template without end": (
            model(beside(jinja, b"{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}")),
            ALLOWED,
        ),
        "template in Latin-1": (model(beside(jinja, b"\xe4\xff")), "is not a text in UTF-8"),
        "template too large": (model(beside(jinja, b"x" * (1 << 20) + b"x")), "allowed: at most 1,048,576"),
        "template of a path": (model(beside("..%2fevil.jinja", TEMPLATE.encode())), "no file of a model"),
        "template of a hidden name": (model(beside(".jinja", TEMPLATE.encode())), "no file of a model"),
        "templates without number": (model(*(beside(f"t{index}.jinja", b"x") for index in range(21))), "templates"),
        "two templates of one name": (model(beside(jinja, b"x"), beside(jinja, b"y")), "two files of this name"),
        "code beside the model": (model(beside("modeling_evil.py", b"import os")), "no file of a model"),
        "a pickle beside the model": (model(beside("training_args.bin", b"\x80\x04")), "no file of a model"),
        "adapters beside the model": (model(beside("adapter_config.json", b"{}")), "no file of a model"),
        "adapters as weights": (model(weights(shard("base_model.model.x.lora_A.weight"), "adapter_model.safetensors")), ALLOWED),
        "generation settings that are a list": (model(beside("generation_config.json", b"[]")), "is not an object"),
        "generation settings of no bytes": (model(beside("generation_config.json", b"")), "is not JSON"),
        "generation settings nested deeply": (model(beside("generation_config.json", _NESTED)), "is not JSON"),
        "generation settings out of range": (
            model(beside("generation_config.json", b'{"do_sample": true, "temperature": -1}')),
            "temperature",
        ),
        "generation settings beyond a float": (
            model(beside("generation_config.json", b'{"do_sample": true, "temperature": 1e999}')),
            "temperature",
        ),
        "generation settings of an endless list": (
            model(beside("generation_config.json", as_json({"eos_token_id": list(range(100_000))}))),
            "eos_token_id",
        ),
        "tokenizer settings that are a list": (model(tokenizer_config([])), "tokenizer_config"),
        "tokenizer settings with a template of numbers": (model(tokenizer_config({"chat_template": 1})), "tokenizer_config"),
        "tokenizer settings with templates of numbers": (model(tokenizer_config({"chat_template": [1, 2]})), ALLOWED),
        "tokenizer settings nested deeply": (model(tokenizer_config(_NESTED)), "is not JSON"),
    }


def _ggufs() -> Table:
    def file(content: bytes, name: str = "model.gguf") -> Upload:
        return (Part(field="weights", name=name, content=content),)

    return {
        "GGUF of four bytes": (file(b"GGUF"), "model.gguf"),
        "GGUF that is a pickle": (file(b"\x80\x04\x95"), "model.gguf"),
        "GGUF of another version": (file(gguf(version=99)), "model.gguf"),
        "GGUF of endless tensors": (file(gguf(num_tensors=2**60)), "a list of"),
        "GGUF of endless entries": (file(gguf(entries=2**60)), "a list of"),
        "GGUF without its numbers": (file(b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(64)), "architecture None"),
        "GGUF with only one tensor": (file(gguf()), ALLOWED),
        "GGUF of a path": (file(gguf(), "..\\model.gguf"), ALLOWED),
    }


def _texts() -> Table:
    def text(content: bytes) -> Upload:
        return dataset("words.txt", content)

    return {
        "text of no bytes": (text(b""), "no text"),
        "text of blanks": (text(b" \n\t\n" * 100), "no text"),
        "text in UTF-16": (text("In the beginning".encode("utf-16")), "UTF-8"),
        "text with half a character": (text(b"a\xed\xa0\x80b"), "UTF-8"),
        "text of a long character": (text(b"\xc0\xaf"), "UTF-8"),
        "text with NUL": (text(b"a\0b"), "NUL"),
        "text of one endless line": (text(b"a" * 1_000_001), "longer than allowed"),
        "text that turns around": (text("a\u202eb".encode()), ALLOWED),
        "text of separators": (text(b"<|endoftext|>\n" * 100), "no text"),
        "a dataset of no ending": (dataset("words", b"a"), "file is named"),
        "a dataset that is an archive": (dataset("words.zip", b"PK\x03\x04"), "file is named"),
        "a dataset that is a script": (dataset("words.txt.exe", b"MZ"), "file is named"),
        "an archive as a text": (dataset("words.txt", b"PK\x03\x04\xff\xff"), "UTF-8"),
    }


def _rows() -> Table:
    def jsonl(content: bytes) -> Upload:
        return dataset("rows.jsonl", content)

    def csv(content: bytes) -> Upload:
        return dataset("rows.csv", content)

    deep: Any = "x"
    for _ in range(40):
        deep = {"a": deep}
    return {
        "row that is a list": (jsonl(b"[1]\n"), "a JSON list"),
        "row that is no JSON": (jsonl(b'{"text": "a"}\nimport os\n'), "line 2"),
        "row nested deeply": (jsonl(b'{"text": "a", "x": ' + _NESTED + b"}\n"), "line 1"),
        "row nested too deep": (jsonl(lines({"text": "a", "x": deep})), "nested deeper than 32"),
        "row without columns": (jsonl(b"{}\n"), "line 1"),
        "row of an endless number": (jsonl(b'{"text": ' + b"9" * 5_000 + b"}\n"), "line 1"),
        "row with NUL in its text": (jsonl(b'{"text": "a\\u0000b"}\n'), "NUL"),
        "row with half a character": (jsonl(b'{"text": "a\\ud800b"}\n'), "half a surrogate"),
        "row of a number": (jsonl(b'{"text": "a"}\n{"text": 1}\n'), "line 2"),
        "row longer than a line": (jsonl(b'{"text": "' + b"a" * 1_000_001 + b'"}\n'), "longer than allowed"),
        "messages of nothing": (jsonl(lines({"messages": []})), "messages"),
        "messages of numbers": (jsonl(lines({"messages": [1]})), "messages[0]"),
        "messages of a role that is a list": (jsonl(lines({"messages": [{"role": [], "content": "x"}]})), "role"),
        "messages with a picture": (
            jsonl(lines({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}]})),
            "parts other than text",
        ),
        "messages without number": (jsonl(lines({"messages": CHAT_ROW["messages"] * 5_001})), "messages"),
        "tools that are no JSON": (jsonl(lines({**CHAT_ROW, "tools": "{"})), "tools"),
        "JSON that is a number": (dataset("rows.json", b"1"), "no JSON array"),
        "JSON nested deeply": (dataset("rows.json", _NESTED), "not JSON"),
        "JSON of lists": (dataset("rows.json", b"[[]]"), "an object"),
        "JSON of nothing": (dataset("rows.json", b"[]"), "no text"),
        "CSV of no bytes": (csv(b""), "no text"),
        "CSV with a header alone": (csv(b"text\n"), "no text"),
        "CSV with NUL": (csv(b"text\na\0b\n"), "NUL"),
        "CSV with a quote that is left open": (csv(b'text\n"a\n'), "not CSV"),
        "CSV with more fields than its header": (csv(b"text\na,b,c\n"), "row 1"),
        "CSV with fewer fields than its header": (csv(b"prompt,completion\na\n"), "row 1"),
        "CSV that is a formula": (csv(b"text\n=cmd|' /C calc'!A0\n"), ALLOWED),
    }


def _parquets() -> Table:
    def file(content: bytes) -> Upload:
        return dataset("rows.parquet", content)

    good = parquet_file({"text": ["one", "two"]})
    long = ["a" * 5_000_000] * 8
    refused = "not readable as parquet"
    wide = {"text": ["x"], **{f"c{index}": [1] for index in range(1_000)}}
    return {
        "Parquet of no bytes": (file(b""), refused),
        "Parquet of eight bytes": (file(b"PAR1PAR1"), refused),
        "Parquet whose footer is longer than it": (file(good[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1"), refused),
        "Parquet whose footer is below zero": (file(good[:-8] + struct.pack("<I", 2**32 - 1) + b"PAR1"), refused),
        "Parquet whose footer is of zeros": (file(b"PAR1" + bytes(100) + struct.pack("<I", 100) + b"PAR1"), refused),
        "Parquet with its pages cut out": (file(good[:4] + good[40:]), "parquet"),
        "Parquet with an encrypted footer": (file(good[:-4] + b"PARE"), refused),
        "Parquet of numbers": (file(parquet_file({"text": [1, 2]})), "text"),
        "Parquet of nothing": (file(parquet_file({"text": pa.array([], pa.string())})), "no text"),
        "Parquet of a null": (file(parquet_file({"text": ["a", None]})), "row 2"),
        "Parquet of broken UTF-8": (
            file(parquet_file({"text": pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())})),
            "parquet",
        ),
        "Parquet of bytes": (file(parquet_file({"text": pa.array([b"abc"], pa.binary())})), "text"),
        "Parquet of many columns": (file(parquet_file(wide)), "1,001 columns"),
        "Parquet of many row groups": (file(parquet_file({"text": ["x"] * 10_001}, row_group_size=1)), "10,001 row groups"),
        "Parquet that unpacks to much": (
            file(parquet_file({"text": long}, compression="zstd", use_dictionary=False)),
            "unpack to",
        ),
        "Parquet that repeats a long text": (file(parquet_file({"text": long}, compression="zstd")), "5,000,000 characters"),
        "Parquet with a column twice": (
            file(parquet_file(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]))),
            "two columns are named 'text'",
        ),
    }


def _prompts() -> Table:
    """A line that cannot be used is named in the facts; the file is taken for its others, as OpenAI's API takes one."""
    return {
        "prompts of no bytes": (prompts(b""), "the file"),
        "prompts of blanks": (prompts(b"\n\n"), "file"),
        "prompts that are no JSON": (prompts(b"Who?\n"), ALLOWED),
        "prompts that are a list": (prompts(b"[]\n"), ALLOWED),
        "prompts nested deeply": (prompts(b'{"prompt": ' + _NESTED + b"}\n"), ALLOWED),
        "prompts in UTF-16": (prompts("{}".encode("utf-16")), "UTF-8"),
        "prompts with NUL": (prompts(b'{"prompt": "a\0"}\n'), "NUL"),
        "prompts of which some can be used": (prompts(lines(PROMPTS[0], {"prompt": 1})), ALLOWED),
        "prompts to another address": (prompts(lines({**PROMPTS[1], "url": "http://169.254.169.254/"})), ALLOWED),
        "prompts that ask for endless tokens": (prompts(lines({"prompt": "a", "max_new_tokens": 10**18})), ALLOWED),
    }
