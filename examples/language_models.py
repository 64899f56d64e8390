"""Logs of lm-evaluation-harness, of an old and a new model -> a certificate, then a gate with a policy. No torch.

python examples/language_models.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import holdfast
from holdfast.certify.harness import read_logs

TASKS = {"gsm8k": 800, "mmlu_law": 300, "mmlu_algebra": 300, "arc_easy": 400, "ifeval": 200}


def write_log(folder: Path, task: str, seed: int, flips: float) -> None:
    """Stands for `lm_eval --tasks … --log_samples --output_path FOLDER`, less the prompts and answers."""
    both, own = random.Random(task), random.Random(f"{task}{seed}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"samples_{task}_2025-06-01T10-00-00.000000.jsonl").open("w") as file:
        for number in range(TASKS[task]):
            doc = {"question": f"{task} {number}", "answer": str(number)}
            right = both.random() < 0.7
            line = {
                "doc_id": number,
                "doc": doc,
                "target": doc["answer"],
                "filter": "none",
                "metrics": ["exact_match"],
                "doc_hash": hashlib.sha256(json.dumps(doc).encode()).hexdigest(),
                "prompt_hash": hashlib.sha256(doc["question"].encode()).hexdigest(),
                "target_hash": hashlib.sha256(doc["answer"].encode()).hexdigest(),
                "exact_match": float(right != (own.random() < flips)),
            }
            file.write(json.dumps(line) + "\n")


def main(folder: Path) -> None:
    """The new model differs on 1 % of the answers, and on a fifth of ifeval's."""
    for task in TASKS:
        write_log(folder / "old", task, seed=0, flips=0.0)
        write_log(folder / "new", task, seed=1, flips=0.2 if task == "ifeval" else 0.01)
    joined = read_logs("lm-eval", folder / "old", folder / "new")
    result = holdfast.certify(joined.table, margin=0.02, tasks=["gsm8k"])
    print(f"gsm8k: {result.verdict}, p = {result.tasks['gsm8k'].p_value:.2g}")
    print(f"all tasks: holdfast gate examples/policy.toml {folder / 'old'} {folder / 'new'} --lm-eval")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
