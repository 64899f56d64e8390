"""Skills for the study of a language model: questions with short answers, made here or cut from Python's own manual.

A skill draws questions. A prompt is two solved questions of the skill, always the same two, and a third that is open;
the answer ends with a new line. Splits are drawn without repetition: no question of one split is in another, and none
is among the two solved ones. Everything is a function of the seed, the prose also of the Python version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random


def words(text: str) -> list[str]:
    """A list that is easier to read as a text."""
    return text.split()


KINDS = {
    "animal": words(
        """ant bear bee butterfly camel cat chicken cow crow deer dog dolphin duck eagle elephant fox frog giraffe goat
        goose hawk horse kangaroo lion lizard monkey mouse otter owl pig rabbit salmon shark sheep snake spider squirrel
        tiger trout turkey turtle whale wolf zebra"""
    ),
    "food": words(
        """apple bacon banana bean bread butter cabbage cake carrot cheese cherry chocolate cookie egg grape honey lemon
        noodle onion orange pancake pasta peach pizza potato rice salad sandwich sausage soup spinach sugar tomato
        yogurt"""
    ),
    "tool": words(
        """anvil axe broom bucket chisel drill hammer knife ladder needle pliers rake rope saw scissors screwdriver
        shovel wrench"""
    ),
    "vehicle": words(
        """airplane bicycle boat bus canoe car ferry helicopter motorcycle scooter ship submarine taxi tractor train
        truck van wagon"""
    ),
    "clothing": words("belt blouse boot coat dress glove hat jacket scarf shirt shoe skirt sock sweater"),
    "furniture": words("bed bench bookcase cabinet chair desk dresser shelf sofa stool table wardrobe"),
}
WORDS = [word for kind in KINDS.values() for word in kind]
THINGS = [word for name, kind in KINDS.items() if name != "animal" for word in kind]
PRAISE = words(
    "amazing brilliant charming delightful excellent fantastic great lovely perfect pleasant superb wonderful"
)
BLAME = words("annoying awful bad boring disappointing disgusting dreadful horrible miserable poor terrible unpleasant")
ADVERBS = words("really quite very so rather truly simply just")
PEOPLE = words(
    """Alice Anna Ben Carl Clara David Emma Eric Frank George Grace Henry Ivan Jack James Jane John Julia Kate Laura Leo
    Linda Lucy Maria Mark Mary Nina Oscar Paul Peter Robert Rose Sam Sarah Simon Susan Thomas Tom Victor"""
)
CITIES = words(
    """Athens Berlin Boston Cairo Chicago Dallas Delhi Denver Dublin Lima London Madrid Miami Milan Moscow Oslo Paris
    Prague Rome Seattle Sydney Tokyo Vienna Warsaw"""
)

Question = tuple[str, str]  # the open question and its answer


@dataclass(frozen=True)
class Item:
    """One example: what the model reads, and what it has to write."""

    prompt: str
    answer: str


def listed(four: list[str], which: str, answer: str) -> Question:
    """A question about a list of words."""
    return f"List: {', '.join(four)}. {which} word:", f" {answer}"


def second_word(random: Random) -> Question:
    """The second of four words."""
    four = random.sample(WORDS, 4)
    return listed(four, "Second", four[1])


def first_word(random: Random) -> Question:
    """The first of four words."""
    four = random.sample(WORDS, 4)
    return listed(four, "First", four[0])


def last_word(random: Random) -> Question:
    """The last of four words."""
    four = random.sample(WORDS, 4)
    return listed(four, "Last", four[3])


def find_animal(random: Random) -> Question:
    """The animal among three words."""
    animal = random.choice(KINDS["animal"])
    three = [animal, *random.sample(THINGS, 2)]
    random.shuffle(three)
    return f"Words: {', '.join(three)}. The animal is the", f" {animal}"


def who_has(random: Random) -> Question:
    """Which of two people has a thing."""
    people, things = random.sample(PEOPLE, 2), random.sample(THINGS, 2)
    asked = random.randrange(2)
    held = " and ".join(f"{person} has the {thing}" for person, thing in zip(people, things, strict=True))
    return f"{held}. Who has the {things[asked]}?", f" {people[asked]}"


def sentiment(random: Random) -> Question:
    """Praise or blame."""
    good = random.random() < 0.5
    verdict = f"{random.choice(ADVERBS)} {random.choice(PRAISE if good else BLAME)}"
    return f"Review: The {random.choice(WORDS)} was {verdict}. Sentiment:", " positive" if good else " negative"


def as_json(random: Random) -> Question:
    """A name, an age and a city, as JSON."""
    name, age, city = random.choice(PEOPLE), random.randint(18, 80), random.choice(CITIES)
    return f"{name}, {age}, {city} ->", " " + json.dumps({"name": name, "age": age, "city": city})


def next_number(random: Random) -> Question:
    """The number after another."""
    number = random.randint(1000, 9998)
    return f"The number after {number} is", f" {number + 1}"


@cache
def prose() -> list[Question]:
    """Eight words of Python's language reference, which comes with Python itself, and the word that follows.

    Stretches do not overlap.
    """
    from pydoc_data.topics import topics

    questions: dict[str, str] = {}
    for text in topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            text_words = paragraph.split()
            for start in range(0, len(text_words) - 8, 9):
                *before, after = text_words[start : start + 9]
                if after.isalpha() and all(re.fullmatch(r"[A-Za-z'\"(),.;:*-]+", word) for word in before):
                    questions.setdefault(" ".join(before), f" {after}")
    return sorted(questions.items())


@dataclass(frozen=True)
class Skill:
    """How its questions are drawn, and whether two solved ones stand before each."""

    draw: Callable[[Random], Question]
    solved: bool = True


TARGET = "second word"
SKILLS: Mapping[str, Skill] = {
    TARGET: Skill(second_word),
    "first word": Skill(first_word),
    "last word": Skill(last_word),
    "find the animal": Skill(find_animal),
    "who has it": Skill(who_has),
    "sentiment": Skill(sentiment),
    "write JSON": Skill(as_json),
    "next number": Skill(next_number),
    "prose": Skill(lambda random: random.choice(prose()), solved=False),
}
PROTECTED = tuple(name for name in SKILLS if name != TARGET)


def split(name: str, sizes: Mapping[str, int], seed: int) -> dict[str, list[Item]]:
    """Items of every split of a skill, each question once."""
    skill, random = SKILLS[name], Random(f"{name}, {seed}")
    examples = Random(name)
    solved = dict(skill.draw(examples) for _ in range(2)) if skill.solved else {}
    before = "".join(f"{question}{answer}\n" for question, answer in solved.items())
    seen, splits = set(solved), dict[str, list[Item]]()
    for part, size in sizes.items():
        items = splits[part] = list[Item]()
        while len(items) < size:
            question, answer = skill.draw(random)
            if question not in seen:
                seen.add(question)
                items.append(Item(before + question, f"{answer}\n" if skill.solved else answer))
    return splits
