"""HoldfastTrainer: a small BERT learns one more kind of request without losing those that it knows."""

from __future__ import annotations

import itertools
import tempfile

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from holdfast.integrations import HoldfastTrainer, RetentionSettings

REQUESTS = {"light": "brighten", "heat": "warm", "clean": "sweep", "lock": "secure", "music": "sing in"}
PLACES = ("kitchen", "hall", "cellar", "attic", "garden", "office", "bedroom", "garage")
TIMES = ("now", "tonight", "at noon", "tomorrow", "on monday", "after lunch", "at dawn", "soon")
POLITE = ("please", "could you", "kindly")


def sentences() -> Dataset:
    """Every request for every place and time, as tokens."""
    rows = list(itertools.product(range(len(REQUESTS)), POLITE, PLACES, TIMES))
    texts = [f"{polite} {list(REQUESTS.values())[kind]} the {place} {time}" for kind, polite, place, time in rows]
    words = sorted({word for text in texts for word in text.split()})
    padded = [([words.index(word) + 1 for word in text.split()] + [0] * 8)[:8] for text in texts]
    mask = [[int(token > 0) for token in row] for row in padded]
    return Dataset.from_dict({"input_ids": padded, "attention_mask": mask, "labels": [row[0] for row in rows]})


def main(folder: str) -> None:
    """An old model that never saw a request for music; a new one that learns it, without the penalty and with it."""
    rows = sentences().shuffle(seed=0)
    learnt, held_out = rows.select(range(480)), rows.select(range(480, len(rows)))
    known, wanted = (learnt.filter(lambda row, music=music: (row["labels"] == 4) == music) for music in (False, True))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=5, **sizes))
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    options = TrainingArguments(folder, max_steps=60, learning_rate=5e-3, per_device_train_batch_size=32, **quiet)

    def show(name: str) -> None:
        inputs = {name: torch.tensor(held_out[name]) for name in ("input_ids", "attention_mask", "labels")}
        right = (model.eval()(**inputs).logits.argmax(dim=1) == inputs["labels"]).float()
        print(name, [round(float(right[inputs["labels"] == kind].mean()), 2) for kind in range(5)])

    Trainer(model, options, train_dataset=known).train()
    show("old:            ")
    old = {name: value.clone() for name, value in model.state_dict().items()}
    protected = known.add_column("task", [list(REQUESTS)[kind] for kind in known["labels"]])
    for beta in (0.0, 50.0):
        model.load_state_dict(old)
        kept = {"protected_dataset": protected, "retention": RetentionSettings(beta=beta)}  # one task for each request
        HoldfastTrainer(model, options, train_dataset=wanted, **kept).train()
        show(f"new, beta = {beta:3g}:")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
