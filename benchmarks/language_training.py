"""A causal language model of transformers on questions with short answers: losses, outcomes, methods, interpolation.

The answer is known, so one forward pass says whether greedy decoding writes it: it does exactly where every token of
the answer has the largest logit after the tokens before it. Sequences are padded on the right; in a causal model no
token sees what comes after it, so that neither a mask nor the padding token matters.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.language_skills import Item
from holdfast.objective.retention import RetentionPenalty
from holdfast.runtime import sums_by

Weights = dict[str, Tensor]
BATCH_TARGET, BATCH_PROTECTED, BATCH_EVALUATE = 16, 4, 250  # the second is for each protected skill
RATE, WARM_UP = 5e-5, 10


@dataclass(frozen=True)
class Encoded:
    """The tokens of prompt and answer, and where the answer begins."""

    tokens: list[int]
    start: int


@dataclass(frozen=True)
class Batch:
    """Padded sequences [n, l], and the answer tokens of all of them, one after the other [t]."""

    tokens: Tensor  # [n, l]
    rows: Tensor  # [t] sequence of an answer token
    before: Tensor  # [t] position whose logits predict it
    answers: Tensor  # [t]


def encode(tokenizer: Any, items: Sequence[Item]) -> list[Encoded]:
    """Prompt and answer are encoded apart: the prompt's tokens are those that a served model would get."""
    prompts = [tokenizer.encode(item.prompt, add_special_tokens=False) for item in items]
    answers = [tokenizer.encode(item.answer, add_special_tokens=False) for item in items]
    return [Encoded(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


def collate(items: Sequence[Encoded], device: torch.device) -> Batch:
    """A batch on the device."""
    tokens = torch.zeros(len(items), max(len(item.tokens) for item in items), dtype=torch.long)
    rows: list[int] = []
    before: list[int] = []
    answers: list[int] = []
    for row, item in enumerate(items):
        tokens[row, : len(item.tokens)] = torch.tensor(item.tokens)
        rows += [row] * (len(item.tokens) - item.start)
        before += range(item.start - 1, len(item.tokens) - 1)
        answers += item.tokens[item.start :]
    lists = (torch.tensor(values, device=device) for values in (rows, before, answers))
    return Batch(tokens.to(device), *lists)


@contextmanager
def precision(device: torch.device) -> Iterator[None]:
    """bfloat16 products on a GPU, float32 on a CPU."""
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        yield


def answer_logits(model: Any, batch: Batch) -> Tensor:
    """Logits [t, vocabulary] of the answer tokens, in float32: bfloat16 has ties among the largest."""
    with precision(batch.tokens.device):
        hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
    return F.linear(hidden[batch.rows, batch.before].float(), model.lm_head.weight)


def mean_by_row(values: Tensor, batch: Batch) -> Tensor:
    """Mean over the answer tokens of each sequence: [t] -> [n]."""
    size = len(batch.tokens)
    return sums_by(batch.rows, values, size) / torch.bincount(batch.rows, minlength=size)


def example_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Mean token loss of each answer [n]."""
    return mean_by_row(F.cross_entropy(logits, batch.answers, reduction="none"), batch)


@dataclass(frozen=True)
class Outcomes:
    """What a model makes of some items."""

    right: list[bool]  # greedy decoding writes the answer
    losses: list[float]


@torch.no_grad()
def evaluate(model: Any, items: Sequence[Encoded], device: torch.device) -> Outcomes:
    """In the order of the items; batches depend on the items alone, so that two models see the same padding."""
    order = sorted(range(len(items)), key=lambda index: (len(items[index].tokens), index))
    right, losses = [False] * len(items), [0.0] * len(items)
    for start in range(0, len(order), BATCH_EVALUATE):
        part = order[start : start + BATCH_EVALUATE]
        batch = collate([items[index] for index in part], device)
        logits = answer_logits(model, batch)
        wrong = sums_by(batch.rows, (logits.argmax(dim=1) != batch.answers).float(), len(part))
        values = example_losses(logits, batch).tolist()
        for index, mistakes, loss in zip(part, wrong.tolist(), values, strict=True):
            right[index], losses[index] = mistakes == 0, loss
    return Outcomes(right, losses)


# -- weights ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer, in float32, from a GGUF file or a transformers folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return unquantized(model).eval(), tokenizer


def unquantized(model: Any) -> Any:
    """The same model without the mark of the file it came from: transformers saves no model that has one."""
    settings = model.config.to_dict()
    if settings.pop("quantization_config", None) is None:
        return model
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    return plain


def weights_of(model: nn.Module) -> Weights:
    """A copy of the parameters; one that is shared by two modules is there once."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@torch.no_grad()
def interpolate(model: nn.Module, old: Weights, new: Weights, lam: float) -> None:
    """Set the model to (1 - lambda) old + lambda new; both ends are exact."""
    for name, value in model.named_parameters():
        value.copy_(torch.lerp(old[name], new[name], lam))


# -- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """What training reads: items of the target, and of each protected skill in order."""

    target: list[Encoded]
    protected: list[list[Encoded]]


@dataclass(frozen=True)
class Step:
    """The protected items of a step: their batch, their skills [n] and the old model's losses [n]."""

    batch: Batch
    skills: Tensor
    old_losses: Tensor


Loss = Callable[[Any, Step], Tensor]  # of the model that is trained, beside the target's loss


def replay(weight: float) -> Loss:
    """The losses of the protected items, as a weighted sum."""
    return lambda model, step: weight * example_losses(answer_logits(model, step.batch), step.batch).mean()


def distill(weight: float, old: Any) -> Loss:
    """KL(old || new) at the answer tokens of the protected items."""

    def loss(model: Any, step: Step) -> Tensor:
        with torch.no_grad():
            before = answer_logits(old, step.batch).log_softmax(dim=1)
        after = answer_logits(model, step.batch).log_softmax(dim=1)
        divergence = F.kl_div(after, before, reduction="none", log_target=True).sum(dim=1)
        return weight * mean_by_row(divergence, step.batch).mean()

    return loss


def retain(beta: float, skills: int, device: torch.device) -> Loss:
    """One constraint a skill: its mean loss does not rise."""
    penalty = RetentionPenalty(num_tasks=skills, beta=beta).to(device)

    def loss(model: Any, step: Step) -> Tensor:
        losses = example_losses(answer_logits(model, step.batch), step.batch)
        return penalty(losses, step.old_losses, step.skills).penalty

    return loss


@dataclass(frozen=True)
class Method:
    """A row of the table: what its strength is, and three values of it, fixed before the run."""

    strength: str
    values: tuple[float, float, float]
    rate: float | None = RATE  # None: the strength is the learning rate


METHODS: Mapping[str, Method] = {
    "fine-tuning": Method("learning rate", (3e-6, 1e-5, 3e-5), rate=None),
    "LoRA": Method("learning rate", (1e-4, 3e-4, 1e-3), rate=None),
    "OSF": Method("kept rank", (0.9, 0.95, 0.99), rate=1e-4),
    "replay": Method("weight", (0.3, 1.0, 3.0)),
    "KL": Method("weight", (0.3, 1.0, 3.0)),
    "holdfast": Method("beta", (20.0, 200.0, 2000.0)),
}


def adapted(name: str, strength: float, model: Any) -> Any:
    """What is trained: the model itself, or an adapter of PEFT around it."""
    if name not in ("LoRA", "OSF"):
        return None
    import peft

    if name == "LoRA":
        settings: Any = peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear")
    else:
        settings = peft.OSFConfig(effective_rank=strength, target_modules="all-linear")
    return peft.get_peft_model(model, settings)


def train(name: str, strength: float, old: Any, data: Data, steps: int, seed: int, device: torch.device) -> Weights:
    """The weights that a method finds from the old model; every draw is a function of seed and step."""
    method = METHODS[name]
    model = copy.deepcopy(old)
    wrapped = adapted(name, strength, model)
    trained = [value for value in (wrapped or model).parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, method.rate or strength, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP))
    )
    extra: dict[str, Callable[[], Loss]] = {
        "replay": lambda: replay(strength),
        "KL": lambda: distill(strength, old),
        "holdfast": lambda: retain(strength, len(data.protected), device),
    }
    beside = extra[name]() if name in extra else None
    old_losses = [evaluate(old, items, device).losses for items in data.protected] if beside else []
    for step in range(steps):
        draw = random.Random(f"{seed}, {step}")
        batch = collate(draw.sample(data.target, min(BATCH_TARGET, len(data.target))), device)
        optimizer.zero_grad(set_to_none=True)
        loss = example_losses(answer_logits(model, batch), batch).mean()
        if beside:
            loss = loss + beside(model, protected_step(data, old_losses, draw, device))
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rates.step()
    return weights_of(wrapped.merge_and_unload() if wrapped else model)


def protected_step(data: Data, old_losses: list[list[float]], draw: random.Random, device: torch.device) -> Step:
    """As many items of every protected skill."""
    drawn = [
        (skill, index)
        for skill, items in enumerate(data.protected)
        for index in draw.sample(range(len(items)), min(BATCH_PROTECTED, len(items)))
    ]
    batch = collate([data.protected[skill][index] for skill, index in drawn], device)
    skills = torch.tensor([skill for skill, _ in drawn], device=device)
    return Step(batch, skills, torch.tensor([old_losses[skill][index] for skill, index in drawn], device=device))
