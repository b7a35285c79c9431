"""Loads what a job left as anyone would, with transformers alone, and lets it write: python demo/generate.py FOLDER [PROMPT]"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def main(folder: Path, prompt: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    token_ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        written = model.generate(
            token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=60, do_sample=False, pad_token_id=0
        )
    if written.shape[1] <= token_ids.shape[1]:
        sys.exit(f"{folder} wrote nothing")
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "In the beginning")
