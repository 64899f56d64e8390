"""Teach a language model one skill and keep two, with transformers and RetentionPenalty; a test says what ships.

python examples/language_retention.py FOLDER [GGUF_FILE]    of transformers, or with a GGUF file in it
"""

from __future__ import annotations

import copy
import sys
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import holdfast

WORDS = "apple boat chair dog eagle fish goat hat ice jar king lamp moon nest oven pen rose ship tree wolf"
SKILLS = {"first": 0, "last": 3, "second": 1}  # which of four words is asked for; the second is to be learnt


def draw(skill: str, random: Random) -> tuple[str, str]:
    """A solved question with an open one, and the answer."""
    lists = [random.sample(WORDS.split(), 4) for _ in range(2)]
    solved, opened = (f"List: {', '.join(words)}. The {skill} word is" for words in lists)
    return f"{solved} {lists[0][SKILLS[skill]]}.\n{opened}", f" {lists[1][SKILLS[skill]]}."


def grade(model, tokenizer, item: tuple[str, str]) -> tuple[torch.Tensor, bool]:
    """Mean token loss of the answer, and whether greedy decoding writes it."""
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False, return_tensors="pt") for text in item)
    logits = model(torch.cat([prompt, answer], dim=1)).logits[0, prompt.shape[1] - 1 : -1]
    return cross_entropy(logits, answer[0]), bool((logits.argmax(dim=1) == answer[0]).all())


def main(folder: str, file: str | None = None, steps: int = 200, held_out: int = 300) -> None:
    """Train under one constraint a skill, then test new items: no skill lost 5 points, and the second word gained."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    old = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval().requires_grad_(False)
    new, penalty, random = copy.deepcopy(old).requires_grad_(True), holdfast.RetentionPenalty(num_tasks=2), Random(0)
    optimizer, tasks = torch.optim.AdamW(new.parameters(), 5e-5), torch.tensor([0, 1] * 4)
    for _ in range(steps):
        wanted, kept = [draw("second", random) for _ in tasks], [draw(list(SKILLS)[task], random) for task in tasks]
        batches = [(new, wanted), (new, kept), (old, kept)]
        losses = [torch.stack([grade(model, tokenizer, item)[0] for item in items]) for model, items in batches]
        optimizer.zero_grad()
        (losses[0].mean() + penalty(losses[1], losses[2], tasks).penalty).backward()
        optimizer.step()
    items = [(skill, draw(skill, random)) for skill in SKILLS for _ in range(held_out)]
    right = [[grade(model, tokenizer, item)[1] for _, item in items] for model in (old, new)]
    table = {"example_id": range(len(items)), "task": [skill for skill, _ in items]}
    result = holdfast.certify({**table, "old_correct": right[0], "new_correct": right[1]}, target="second", margin=0.05)
    for task in (*result.tasks.values(), result.target):
        print(f"{task.counts.task}: {task.counts.gained} gained, {task.counts.lost} lost: {task.verdict}")
    print(f"{result.verdict}: the {'new' if result.certified else 'old'} model ships")


if __name__ == "__main__":
    main(*sys.argv[1:3])
