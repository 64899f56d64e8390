"""Strict configuration: what is wrong is named, and so is the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast.compare.grid  # its sections are sections too
from holdfast.config import CandidatesConfig, RoundConfig, TrainConfig, TuneConfig, parse, read_toml
from holdfast.config.base import Config
from holdfast.errors import UserError, nearest
from holdfast.methods.holdfast import HoldfastConfig
from holdfast.methods.registry import BUILT_IN, find

BASE: dict[str, Any] = {
    "task": {"target": "a"},
    "data": {"source": {"kind": "digits"}},
    "model": {"architecture": "tiny"},
}


def fault(**sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        parse(RoundConfig, {**BASE, **sections}, "ROUND.toml")
    return caught.value.text()


def test_defaults_are_the_method() -> None:
    assert parse(RoundConfig, BASE, "x").method == HoldfastConfig()
    assert parse(RoundConfig, {**BASE, "method": {"beta": 7}}, "x").method == HoldfastConfig(beta=7)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"method": {"bta": 3}}, "did you mean 'beta'?"),
        ({"method": {"name": "finetune", "beta": 3}}, "unknown key 'method.beta'"),
        ({"data": {"source": {"knd": "x"}}}, "unknown key 'data.source.knd'"),
        ({"data": {"source": [{"kind": "digits"}, {"kind": "digits", "pth": ""}]}}, "data.source.1.pth"),
        ({"data": {"source": {"kind": "folder"}}}, "needs a path"),
        ({"data": {"source": {"kind": "folder", "path": "x", "first": 3}}}, "first is for a source of kind 'csv'"),
        ({"data": {**BASE["data"], "roles": {"dev": 0.6, "test": 0.5}}}, "leaves nothing to train on"),
        ({"task": {}}, "'task.target' is missing"),
        ({"model": {}}, "give start"),
        ({"model": {"start": "x", "architecture": "tiny"}}, "not both"),
        ({"train": {"batch": 2, "target_share": 0.01}}, "one side empty"),
        ({"train": {"steps": 5, "warmup_steps": 5}}, "below steps"),
        ({"train": {"crop_scale": [0.9, 0.5]}}, "least <= greatest"),
        ({"certify": {"confidence": 1.0}}, "less than 1"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"unknown": 1}, "known names"),
    ],
)
def test_faults_name_key_and_remedy(sections: dict[str, Any], expected: str) -> None:
    assert expected in fault(**sections)


def test_configs_are_frozen() -> None:
    config = parse(RoundConfig, BASE, "x")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


def test_lambda_zero_is_a_candidate_only_where_its_target_is_new() -> None:
    assert CandidatesConfig().lambdas == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert CandidatesConfig(refit_target=False).lambdas == (0.25, 0.5, 0.75, 1.0)
    assert CandidatesConfig(interpolation=(1.0, 0.0, 1.0)).lambdas == (0.0, 1.0)
    with pytest.raises(ValueError, match="leaves no candidate but the old model"):
        CandidatesConfig(interpolation=(0.0,), refit_target=False)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        CandidatesConfig(interpolation=(1.5,))
    with pytest.raises(ValueError, match="at least one number"):
        CandidatesConfig(target_bias=())


# -- strictly ---------------------------------------------------------------------------------------------------------


def sections(base: type[Config] = Config) -> Iterator[type[Config]]:
    for section in base.__subclasses__():
        yield section
        yield from sections(section)


def faults_of(section: type[Config], key: str, value: Any) -> list[Any]:
    """What validation says of one key of a section; other keys are of no interest."""
    from pydantic import ValidationError

    try:
        section.model_validate({key: value})
    except ValidationError as error:
        return [error for error in error.errors() if error["loc"][:1] == (key,) and error["type"] != "value_error"]
    return []


def test_no_number_of_any_section_takes_a_bool_a_string_or_something_that_is_not_finite(
    tried: Callable[..., None],
) -> None:
    numbers = 0
    for name in BUILT_IN:
        find(name)
    for section in sections():
        for key, field in section.model_fields.items():
            if field.annotation in (int, float) or key in ("margin", "seed", "dev"):
                numbers += 1
                for wrong in (
                    True,
                    "40",
                    "0.5",
                    float("nan"),
                    float("inf"),
                    -float("inf"),
                    [],
                    {"a": True},
                    {"a": "1"},
                ):
                    tried("bad inputs")
                    assert faults_of(section, key, wrong), (section.__name__, key, wrong)
            if field.annotation is bool:
                for wrong in (0, 1, "true", "yes", None):
                    tried("bad inputs")
                    assert faults_of(section, key, wrong), (section.__name__, key, wrong)
    assert numbers > 50
    assert holdfast.compare.grid.StudyConfig in set(sections())


def test_whole_numbers_stand_for_floats_arrays_for_tuples_and_strings_for_paths() -> None:
    config = parse(
        RoundConfig,
        {
            **BASE,
            "train": {"learning_rate": 1, "crop_scale": [1, 1], "speed": "graphs"},
            "candidates": {"interpolation": [0, 1], "target_bias": [0]},
            "certify": {"margin": {"a": 0}, "ledger": "here"},
            "data": {"source": [{"kind": "digits"}], "roles": {"dev": 300, "sealed": 0, "test": 1.0 / 3}},
            "task": {"target": "a", "protected": ["b"], "template": ["a {}", "the {}"]},
        },
        "x",
    )
    assert config.train.learning_rate == 1.0
    assert config.train.crop_scale == (1.0, 1.0)
    assert config.candidates.interpolation == (0.0, 1.0)
    assert config.certify.ledger == Path("here")
    assert (config.data.roles.dev, config.data.roles.sealed) == (300, 0.0)
    assert config.task.templates == ("a {}", "the {}")
    assert parse(RoundConfig, config.model_dump(mode="json"), "x") == config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": {"steps": True}}, "train.steps: Input should be a valid integer"),
        ({"train": {"steps": "40"}}, "train.steps: Input should be a valid integer"),
        ({"train": {"crop_scale": [0.5, float("nan")]}}, "train.crop_scale.1: Input should be a finite number"),
        ({"model": {"architecture": "tiny", "head_rank": 1e9}}, "model.head_rank: Input should be a valid integer"),
        ({"candidates": {"target_bias": [float("nan")]}}, "candidates.target_bias.0: Input should be a finite number"),
        ({"candidates": {"target_bias": [float("inf")]}}, "candidates.target_bias.0: Input should be a finite number"),
        (
            {"candidates": {"interpolation": [float("nan")]}},
            "candidates.interpolation.0: Input should be a finite number",
        ),
        ({"certify": {"margin": float("nan")}}, "certify.margin: Input should be a finite number"),
        ({"certify": {"margin": {"int": float("inf")}}}, "certify.margin.int: Input should be a finite number"),
        ({"data": {**BASE["data"], "roles": {"dev": True}}}, "data.roles.dev: Input should be"),
        ({"data": {"source": []}}, "at least one source"),
        ({"data": {**BASE["data"], "negatives": []}}, "leave the key out"),
        ({"task": {"target": "a", "template": []}}, "template is empty"),
        ({"task": {"target": "a", "names": {"a": 3}}}, "task.names.a: Input should be a valid string"),
        ({"method": {"name": "co2l"}, "train": {"batch": 4, "target_share": 0.25}}, "co2l contrasts target pairs"),
        ({"train": {"learning_rate": 1e300}}, "train.learning_rate"),
        ({"seed": 10**30}, "seed"),
        ({"candidates": {"checkpoints": "last"}}, "candidates.checkpoints must be a list\n  found:    'last'"),
        ({"seed": 16**9000}, "thousands of digits"),
        ({"seed": "x" * 100_000}, "seed"),
    ],
    ids=lambda value: str(value)[:60] if not isinstance(value, dict) or "seed" not in value else "seed",
)
def test_what_cannot_be_used_is_one_short_sentence(
    changes: dict[str, Any], expected: str, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    message = fault(**changes)
    assert expected in message
    assert len(message) < 600


def test_base_models_have_templates_and_classes_too(tried: Callable[..., None]) -> None:
    base = {key: BASE[key] for key in ("data", "model")}
    assert parse(TuneConfig, base, "x").template == "a photo of a {}"
    for wrong in ({"template": []}, {"template": "no place"}, {"classes": ["a", "a"]}):
        tried("bad inputs")
        with pytest.raises(UserError):
            parse(TuneConfig, {**base, **wrong}, "x")


NOT_TOML = {
    "arrays in arrays": "x = " + "[" * 5000 + "]" * 5000,
    "tables in tables": "x = " + "{a=" * 3000 + "1" + "}" * 3000,
    "a long dotted key": "a." * 1_000_000 + "a = 1",
    "a long quoted key": '"a".' * 1000 + "a = 1",
    "a long header": "[" + "a." * 1000 + "a]",
    "a long key inside": "x = { " + "a . " * 1000 + "a = 1 }",
    "forty tables": "".join(f"[{'.'.join('abcdefgh'[i % 8] for i in range(n + 1))}]\n" for n in range(40)),
    "nothing TOML": "<html>",
    "a date that is none": "x = 2020-99-99",
    "a number too long": "x = " + "9" * 10_000,
}


@pytest.mark.parametrize("name", NOT_TOML)
def test_toml_that_nobody_can_walk_down_is_refused(name: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs")
    path = tmp_path / "ROUND.toml"
    path.write_text(NOT_TOML[name])
    with pytest.raises(UserError, match="not valid TOML") as caught:
        read_toml(path)
    assert len(caught.value.text()) < 600


def test_only_regular_files_of_some_size_are_read_as_toml(tmp_path: Path, tried: Callable[..., None]) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "large.toml").write_bytes(b"#" * (9 << 20))
    (tmp_path / "words.toml").write_bytes(b"\xff\xfe\x00")
    for name, message in {
        "pipe.toml": "a named pipe",
        "zero.toml": "a device",
        "folder.toml": "is a folder",
        "large.toml": "larger than",
        "loop.toml": "cannot be read",
        "words.toml": "not a TOML file",
        "none.toml": "does not exist",
        "words.toml/x": "cannot be read",
        "x" * 5000: "cannot be read",
    }.items():
        tried("bad inputs")
        with pytest.raises(UserError) as caught:
            read_toml(tmp_path / name)
        assert message in caught.value.text()


def test_settings_of_the_command_line_are_as_strict() -> None:
    assert parse(TrainConfig, TrainConfig().model_dump(), "[train]") == TrainConfig()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("[data.roles]\nsealed = 1.6", "data.roles.sealed: Input should be less than or equal to 1\n  found:    1.6"),
        ('[certify.margin]\ndog = "17 %"', "certify.margin.dog: Input should be a valid number\n  found:    '17 %'"),
        ("[certify.margin]\ndog = 17.0", r"the margin 17 (dog) must lie in [0, 1): write 2 % as 0.02"),
        ('[train]\nsteps = "a"\nbatch = true', "train.steps: Input should be a valid integer (and 1 more)"),
    ],
)
def test_a_value_of_several_kinds_is_explained_once(section: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ROUND.toml"
    path.write_text(
        f'[task]\ntarget = "dog"\n[model]\narchitecture = "tiny"\n[data]\nsource = {{ kind = "digits" }}\n{section}\n'
    )
    with pytest.raises(UserError, match=re.escape(message)):
        parse(RoundConfig, read_toml(path), str(path))


def test_a_name_in_other_letter_case_is_the_nearest() -> None:
    assert nearest("vit-b-16", ["ViT-S-16", "ViT-B-16", "vit-b-6"]) == "did you mean 'ViT-B-16'?"
