"""Asks two models the same questions with transformers alone: python demo/answers.py BASE TUNED QUESTION...

Prints a JSON line for each question: ``{"question": ..., "base": ..., "tuned": ...}``. The most likely tokens are taken, with
less weight on those that were written already, so that small models do not repeat themselves.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 80
REPETITION_PENALTY = 1.3


def answer_all(folder: Path, questions: list[str]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    answers = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                repetition_penalty=REPETITION_PENALTY,
            )
        answers.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return answers


def main(base: Path, tuned: Path, questions: list[str]) -> None:
    for question, before, after in zip(questions, answer_all(base, questions), answer_all(tuned, questions), strict=True):
        print(json.dumps({"question": question, "base": before, "tuned": after}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
