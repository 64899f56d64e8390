"""Retention for language models: losses of completions, adapters, TRL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from holdfast.errors import UserError
from holdfast.integrations import HoldfastSFTTrainer, HoldfastTrainer, RetentionMixin, RetentionSettings
from holdfast.integrations.losses import transformers_loss
from holdfast.integrations.old_model import AdaptersOff
from tests.integrations.helpers import arguments, assert_equal, weights

WORDS = ["<pad>", "<eos>", "<unk>", "plus", "minus", "is", "zero", "one", "two", "three", "four", "five", "six"]
NUMBERS = WORDS[6:]
SETTINGS = RetentionSettings(beta=50.0, rows_per_task=6)
Tried = Callable[..., None]


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            attention_dropout=dropout,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=16
    )


def sums(word: str) -> list[dict[str, Any]]:
    """Completions of one word, and of two."""
    rows: list[dict[str, Any]] = []
    for a in range(4):
        for b in range(3):
            result = a + b if word == "plus" else a - b
            answer = NUMBERS[result] if result >= 0 else f"minus {NUMBERS[-result]}"
            prompt = f"{NUMBERS[a]} {word} {NUMBERS[b]} is"
            rows.append({"prompt": prompt, "completion": f" {answer}", "task": word})
    return rows


def tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for row in rows:
        prompt = [WORDS.index(word) for word in row["prompt"].split()]
        completion = [*(WORDS.index(word) for word in row["completion"].split()), 1]
        labels = [-100] * len(prompt) + completion
        made.append({"input_ids": prompt + completion, "labels": labels, "task": row["task"]})
    return made


COLLATE = DataCollatorForSeq2Seq(tokenizer())


def without_task(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "task"} for row in rows]


def causal(folder: Path, model: Any, protected: list[dict[str, Any]], **named: Any) -> HoldfastTrainer:
    options = {"learning_rate": 0.02, "optim": "adamw_torch", "remove_unused_columns": True, **named}
    return HoldfastTrainer(
        model,
        arguments(folder, **options),
        data_collator=COLLATE,
        train_dataset=without_task(tokens(sums("minus"))),  # pyright: ignore[reportArgumentType]
        protected_dataset=protected,
        retention=SETTINGS,
    )


def test_the_loss_of_a_row_is_what_the_model_says_of_it_alone() -> None:
    model, rows = llama().eval(), without_task(tokens(sums("minus")))
    alone = torch.stack([model(**COLLATE([row])).loss for row in rows])
    assert len({len(row["labels"]) for row in rows}) == 2  # rows of different lengths, padded
    torch.testing.assert_close(transformers_loss(model, COLLATE(rows)), alone)


def test_the_loss_of_a_classified_row() -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=3, **small)).eval()
    batch = {"input_ids": torch.randint(9, (4, 5)), "labels": torch.tensor([0, 1, 2, 1])}
    parts = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(4)]
    torch.testing.assert_close(transformers_loss(model, batch), torch.stack([model(**part).loss for part in parts]))


def test_labels_that_have_no_cross_entropy_by_row(tried: Tried) -> None:
    tried("bad inputs", 2)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=9, num_labels=3, **small)).eval()
    batch = {"input_ids": torch.randint(9, (4, 5))}
    with pytest.raises(UserError, match="no labels"):
        transformers_loss(model, batch)
    with pytest.raises(UserError, match="no cross-entropy for each row"):
        transformers_loss(model, {**batch, "labels": torch.rand(4, 3)})


def test_a_skill_is_kept_while_another_is_learnt(tmp_path: Path) -> None:
    """The mean loss on protected completions stays; plain fine-tuning raises it."""
    model = llama()
    first = causal(tmp_path, model, tokens(sums("plus")), max_steps=60, per_device_train_batch_size=12)
    first.train_dataset = without_task(tokens(sums("plus")))  # pyright: ignore[reportAttributeAccessIssue]
    first.retention_term.penalty.beta = 0.0
    first.train()
    start, plus = weights(model), COLLATE(without_task(tokens(sums("plus"))))
    before = float(transformers_loss(model.eval(), plus).detach().mean())
    options = {"max_steps": 40, "per_device_train_batch_size": 12, "learning_rate": 0.005}
    after: dict[float, float] = {}
    for beta in (0.0, 50.0):
        model.load_state_dict(start)
        built = causal(tmp_path, model, tokens(sums("plus")), **options)
        built.retention_term.penalty.beta = beta
        built.train()
        after[beta] = float(transformers_loss(model.eval(), plus).detach().mean())
    assert after[0.0] - before > 0.5
    assert after[50.0] - before < 0.1


def test_rows_whose_labels_were_cut_off(tmp_path: Path, tried: Tried) -> None:
    tried("bad inputs")
    rows = [{**row, "labels": [-100] * len(row["labels"])} for row in tokens(sums("plus"))]
    with pytest.raises(UserError, match="a protected row has no labelled token"):
        causal(tmp_path, llama(), rows).train()


# -- adapters ------------------------------------------------------------------------------------------------------


def adapted(**options: Any) -> Any:
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return get_peft_model(llama(), config)


def test_adapters_need_no_second_model(tmp_path: Path) -> None:
    """The old model is the same module with its adapters off: as a frozen copy of the base model says it."""
    ways: list[Any] = []
    for old in (None, llama().eval()):
        torch.manual_seed(1)
        model = adapted(lora_dropout=0.2)
        built = HoldfastTrainer(
            model,
            arguments(tmp_path, learning_rate=0.5, remove_unused_columns=True),
            data_collator=COLLATE,
            train_dataset=without_task(tokens(sums("minus"))),  # pyright: ignore[reportArgumentType]
            protected_dataset=tokens(sums("plus")),
            retention=SETTINGS,
            old_model=old,
        )
        assert isinstance(built.retention_term.old, AdaptersOff) == (old is None)
        built.train()
        ways.append((weights(model), built.retention_term.penalty.u.value.clone()))
    assert_equal(ways[0][0], ways[1][0])
    assert ways[0][1].abs().max() > 0
    assert torch.equal(ways[0][1], ways[1][1])


def test_adapters_that_are_not_at_their_start(tmp_path: Path, tried: Tried) -> None:
    tried("bad inputs", 2)
    model = adapted()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(5.0)
    with pytest.raises(UserError, match="not the one that training starts from"):
        causal(tmp_path, model, tokens(sums("plus"))).train()
    with pytest.raises(UserError, match="train biases of the base model"):
        causal(tmp_path, adapted(bias="all"), tokens(sums("plus")))


# -- TRL -----------------------------------------------------------------------------------------------------------


def sft_arguments(folder: Path, **options: Any) -> SFTConfig:
    default: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return SFTConfig(**{**default, **options})


def test_sft_prepares_protected_rows_as_its_own(tmp_path: Path) -> None:
    built = HoldfastSFTTrainer(
        llama(),
        sft_arguments(tmp_path),
        train_dataset=Dataset.from_list(without_task(sums("minus"))),
        processing_class=tokenizer(),
        protected_dataset=Dataset.from_list([*sums("plus"), *sums("minus")]),
        retention=SETTINGS,
    )
    term = built.retention_term
    old = term.old
    assert old is not None
    assert term.rows.names == ("minus", "plus")
    plus = [row for row in term.rows.dataset if row["task"] == "plus"]
    assert [[row["input_ids"], row["labels"]] for row in plus] == [
        [row["input_ids"], row["labels"]] for row in tokens(sums("plus"))
    ]
    before = weights(old.module)
    built.train()
    history = [row for row in built.state.log_history if "loss" in row]
    assert history[0]["retention/h/plus"] == pytest.approx(0.0, abs=1e-6)
    assert history[-1]["retention/h/plus"] != pytest.approx(0.0, abs=1e-6)  # the old model did not move along
    assert_equal(weights(old.module), before)


def test_accumulation_in_sft_is_one_larger_batch(tmp_path: Path) -> None:
    class MyTrainer(RetentionMixin, SFTTrainer):
        pass

    found: list[dict[str, torch.Tensor]] = []
    for micro, accumulation in ((4, 1), (2, 2)):
        built = MyTrainer(
            llama().double(),
            sft_arguments(tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation),
            train_dataset=Dataset.from_list(without_task(tokens(sums("minus"))[:4])),
            processing_class=tokenizer(),
            protected_dataset=Dataset.from_list(tokens(sums("plus"))),
            retention=SETTINGS,
        )
        built.retention_term.penalty.double()
        built.train()
        found.append(weights(built.model))
    assert_equal(found[1], found[0], 1e-6)
    assert (found[0]["lm_head.weight"] - llama().lm_head.weight).abs().max() > 1e-3
