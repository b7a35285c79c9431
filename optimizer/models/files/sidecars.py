"""Lists the files that make a folder of weights a chat model: tokenizer, templates, generation settings. Reads names only.

They are carried from the folder that was submitted to the model's own, and from there to what a job exports.
"""

from collections.abc import Iterator
from pathlib import Path

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SIDECAR_NAMES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    "special_tokens_map.json",
    "added_tokens.json",
    GENERATION_FILE,
    TEMPLATE_FILE,
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
MAX_SIDECAR_BYTES = 50_000_000
"""Size of the largest file that is kept; tokenizers of 262,144 tokens have about 35 MB."""
MAX_TEMPLATES = 20


def sidecar_files(folder: str | Path) -> list[str]:
    """Names, inside ``folder``, of the files to carry over, in a fixed order.

    ``additional_chat_templates/NAME.jinja`` are among them, and so are tokenizer.json and generation_config.json: whoever
    writes their own leaves them out.
    """
    root = Path(folder)
    return [*(name for name in SIDECAR_NAMES if (root / name).is_file()), *_templates(root)]


def is_sidecar(name: str) -> bool:
    """Report whether a file of this name belongs to a model; ``name`` may hold one folder."""
    parent, _, file = name.rpartition("/")
    if not parent:
        return name in SIDECAR_NAMES
    return parent == TEMPLATES_FOLDER and file.endswith(".jinja") and file.removesuffix(".jinja").isidentifier()


def _templates(root: Path) -> Iterator[str]:
    folder = root / TEMPLATES_FOLDER
    if not folder.is_dir():
        return
    names = sorted(f"{TEMPLATES_FOLDER}/{path.name}" for path in folder.glob("*.jinja"))
    yield from [name for name in names if is_sidecar(name) and (root / name).is_file()][:MAX_TEMPLATES]
