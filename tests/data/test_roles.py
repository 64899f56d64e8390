from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import write_folder
from pydantic import ValidationError

from holdfast.config import RolesConfig, SourceConfig
from holdfast.data.catalogue import Catalogue, catalogue_schema, count_problems
from holdfast.data.roles import Assigned, assign, count_roles, fingerprint_roles, number_of
from holdfast.data.sources import catalogue
from holdfast.data.task import Role
from holdfast.errors import UserError


def table(rows: list[tuple[str, str, str | None]]) -> Catalogue:
    """A catalogue of (id, class, split) without any files."""
    import pyarrow as pa

    values = [
        {"example_id": item, "class": label, "split": split, "source": "s", "locator": str(n), "reader": 0, "index": n}
        for n, (item, label, split) in enumerate(rows)
    ]
    return Catalogue(pa.Table.from_pylist(values, schema=catalogue_schema()), ())


def by_id(assigned: Assigned) -> dict[str, Role]:
    return dict(zip(assigned.ids, assigned.roles, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 10_000), min_size=2, max_size=200), st.randoms(use_true_random=False))
def test_roles_are_stable_when_images_are_added_and_reordered(numbers: set[int], random: object) -> None:
    rows = [(str(number), "ab"[number % 2], None) for number in sorted(numbers)]
    everything = by_id(assign(table(rows), "ab", RolesConfig(base=0.1)))
    random.shuffle(rows)  # type: ignore[attr-defined]
    part = by_id(assign(table(rows[: len(rows) // 2]), "ab", RolesConfig(base=0.1)))
    assert all(everything[one] == role for one, role in part.items())


def test_fractions_come_out() -> None:
    rows = [(str(number), "a", None) for number in range(20_000)]
    counts = Counter(by_id(assign(table(rows), "a", RolesConfig(base=0.1, dev=0.2, sealed=0.3, test=0.05))).values())
    for role, share in (("base", 0.1), ("dev", 0.2), ("sealed", 0.3), ("test", 0.05), ("train", 0.35)):
        assert abs(counts[Role(role)] / 20_000 - share) < 0.015


def test_counts_are_exact_and_mix_with_fractions() -> None:
    rows = [(str(number), "ab"[number % 2], None) for number in range(3000)]
    config = RolesConfig(base=300, dev=200, sealed=690, test=0.5)
    for counts in count_roles(assign(table(rows), "ab", config)).values():
        assert (counts["base"], counts["dev"], counts["sealed"]) == (300, 200, 690)
        assert abs(counts["test"] - 155) < 45
    # Who is picked depends on the pictures and not on the order in which they are found.
    assert by_id(assign(table(rows[::-1]), "ab", config)) == by_id(assign(table(rows), "ab", config))
    with pytest.raises(UserError, match=r"too few images[\s\S]*1190"):
        assign(table(rows[:2000]), "ab", config)


def test_whole_numbers_are_counts_and_the_rest_fractions() -> None:
    config = RolesConfig.model_validate({"base": 1, "dev": 0.5, "sealed": 0, "test": 0.25})
    assert (config.base, config.dev, config.sealed, config.test) == (1, 0.5, 0.0, 0.25)
    assert isinstance(config.base, int)
    assert isinstance(config.sealed, float)
    assert RolesConfig.model_validate_json(config.model_dump_json()) == config
    for wrong in ({"dev": 1.0}, {"dev": -1}, {"dev": 1.5}, {"dev": 0.6, "test": 0.4, "sealed": 0.0}):
        with pytest.raises(ValidationError):
            RolesConfig.model_validate(wrong)


def test_own_splits_win_and_fill_their_role() -> None:
    rows = [(f"train{n}", "a", "train") for n in range(200)] + [(f"test{n}", "a", "test") for n in range(20)]
    rows += [(f"b{n}", "b", "train") for n in range(200)]
    counts = count_roles(assign(table(rows), "ab", RolesConfig(dev=0.2, sealed=0.2, test=0.2)))
    assert counts["a"]["test"] == 20  # the class's own, none of its training images
    assert counts["b"]["test"] > 20  # this class brings none


def test_the_strictest_copy_is_kept(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train/cat": 30, "test/cat": 5, "train/dog": 30, "test/dog": 5})
    shutil.copy(tmp_path / "test/cat/0000.jpg", tmp_path / "train/cat/leak.jpg")
    shutil.copy(tmp_path / "train/cat/0001.jpg", tmp_path / "train/cat/twice.jpg")
    shutil.copy(tmp_path / "train/dog/0001.jpg", tmp_path / "train/cat/contradiction.jpg")
    found = catalogue([SourceConfig(path=tmp_path)], Path())
    assigned = assign(found, ("cat", "dog"), RolesConfig())
    assert count_problems(assigned.problems) == {
        "copy in another split": 1,
        "duplicate": 1,
        "contradicting labels": 1,
    }
    assert len(set(assigned.ids)) == len(assigned.ids) == 30 + 5 + 30 + 5 - 1
    leak = next(item for item in assigned.problems if item.kind == "copy in another split")
    assert "leak.jpg" in leak.where
    roles = assigned.table(found)
    kept = {row["locator"]: row["role"] for row in roles.to_pylist()}
    assert kept[f"{tmp_path}/test/cat/0000.jpg"] == "test"
    assert f"{tmp_path}/train/cat/leak.jpg" not in kept


def test_fingerprint_follows_content_and_roles_not_places(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"cat": 10, "dog": 10})
    shutil.copytree(tmp_path / "a", tmp_path / "b")

    def fingerprint(path: Path, config: RolesConfig) -> str:
        found = catalogue([SourceConfig(path=path)], Path())
        return fingerprint_roles(assign(found, ("cat", "dog"), config).table(found))

    assert fingerprint(tmp_path / "a", RolesConfig()) == fingerprint(tmp_path / "b", RolesConfig())
    assert fingerprint(tmp_path / "a", RolesConfig()) != fingerprint(tmp_path / "a", RolesConfig(dev=0.4))


def test_numbers_are_fixed_for_ever() -> None:
    # Another number here would move images between roles of rounds that were certified.
    assert number_of("00") == 15180091991176352327 / 2**64


def test_shares_of_one_class_move_no_image_of_another() -> None:
    rows = [(str(number), "abc"[number % 3], None) for number in range(3000)]
    plain = by_id(assign(table(rows), "abc", RolesConfig()))
    config = RolesConfig.model_validate({"by_class": {"b": {"sealed": 0.6, "dev": 0.1}}})
    mixed = assign(table(rows), "abc", config)
    assert all(plain[row] == role for row, role in by_id(mixed).items() if int(row) % 3 != 1)
    counts = count_roles(mixed)["b"]
    for role, share in (("dev", 0.1), ("sealed", 0.6), ("test", 0.2), ("train", 0.1)):
        assert abs(counts[role] / 1000 - share) < 0.05
    assert by_id(assign(table(rows[::-1]), "abc", config)) == by_id(mixed)


def test_shares_of_one_class_may_be_counts() -> None:
    rows = [(str(number), "ab"[number % 2], None) for number in range(200)]
    config = RolesConfig.model_validate({"by_class": {"b": {"sealed": 60, "dev": 10, "test": 0.0}}})
    counts = count_roles(assign(table(rows), "ab", config))["b"]
    assert counts == {"sealed": 60, "dev": 10, "train": 30}


def test_shares_of_a_class_leave_something_and_name_a_class(tried: Callable[..., None]) -> None:
    tried("bad inputs", 2)
    with pytest.raises(ValidationError, match=r"by_class\.b: .* leaves nothing to train on"):
        RolesConfig.model_validate({"by_class": {"b": {"sealed": 0.7}}})
    config = RolesConfig.model_validate({"by_class": {"hors": {"sealed": 0.5}}})
    rows = [(str(number), "horse", None) for number in range(10)]
    with pytest.raises(UserError, match="'hors' is no class of the sources"):
        assign(table(rows), ["horse"], config)
