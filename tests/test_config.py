"""Strict configuration: what is wrong is named, and so is the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import CertifyConfig, HoldfastConfig, RoundConfig, parse
from holdfast.errors import UserError

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
    assert CertifyConfig().walk == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert CertifyConfig(fit_target=False).walk == (0.25, 0.5, 0.75, 1.0)
    assert CertifyConfig(walk_back=(1.0, 0.0, 1.0)).walk == (0.0, 1.0)
    with pytest.raises(ValueError, match="leaves no candidate but the old model"):
        CertifyConfig(walk_back=(0.0,), fit_target=False)
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        CertifyConfig(walk_back=(1.5,))
    with pytest.raises(ValueError, match="none below 0"):
        CertifyConfig(hold_back=(-1.0,))
