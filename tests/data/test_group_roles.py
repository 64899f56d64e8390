"""A group (a video, a patient) has one role, whatever kind of source names it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import encode, picture

from holdfast.config import DataConfig, RolesConfig, SourceConfig, TaskConfig
from holdfast.data.assemble import assemble
from holdfast.data.catalogue import Catalogue, catalogue_schema, count_problems
from holdfast.data.roles import Assigned, assign, fingerprint_roles
from holdfast.data.sources import catalogue
from holdfast.data.task import Role
from holdfast.errors import UserError

Row = tuple[str, str, str | None, str | None]


def table(rows: list[Row]) -> Catalogue:
    """A catalogue of (id, class, split, group) without any files."""
    values = [
        {
            "example_id": identity,
            "class": label,
            "split": split,
            "group": group,
            "source": "s",
            "locator": str(index),
            "reader": 0,
            "index": index,
        }
        for index, (identity, label, split, group) in enumerate(rows)
    ]
    return Catalogue(pa.Table.from_pylist(values, schema=catalogue_schema()), ())


def roles_by_group(rows: list[Row], assigned: Assigned) -> dict[str, set[str]]:
    group_of = {identity: group for identity, _, _, group in rows}
    found: dict[str, set[str]] = defaultdict(set)
    for identity, role in zip(assigned.ids, assigned.roles, strict=True):
        found[str(group_of[identity])].add(role.value)
    return found


def videos(count: int, frames: int = 5) -> list[Row]:
    return [(f"{v}-{f}", "ab"[(v + f) % 2], None, f"video {v}") for v in range(count) for f in range(frames)]


def test_a_group_has_one_role_and_shares_come_out() -> None:
    rows = videos(2000)
    found = roles_by_group(rows, assign(table(rows), "ab", RolesConfig(base=0.1, dev=0.2, sealed=0.3, test=0.1)))
    assert all(len(roles) == 1 for roles in found.values())
    shares = {role: sum(roles == {role} for roles in found.values()) / 2000 for role in ("base", "dev", "sealed")}
    assert shares == pytest.approx({"base": 0.1, "dev": 0.2, "sealed": 0.3}, abs=0.04)


def test_roles_of_groups_are_stable_when_groups_are_added() -> None:
    rows = videos(60)
    everything = roles_by_group(rows, assign(table(rows), "ab", RolesConfig()))
    part = roles_by_group(rows, assign(table(rows[::-1][:150]), "ab", RolesConfig()))
    assert all(everything[name] == roles for name, roles in part.items())


def test_a_group_in_several_splits_takes_the_strictest() -> None:
    rows: list[Row] = [("1", "a", "val", "v"), ("2", "a", "test", "v"), ("3", "a", None, "v"), ("4", "a", None, None)]
    assigned = assign(table(rows), "a", RolesConfig())
    assert roles_by_group(rows, assigned)["v"] == {"test"}
    assert count_problems(assigned.problems) == {"group in several splits": 1}


def test_whole_numbers_of_images_are_refused_with_groups(tried) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match="counts images, and the data have groups"):
        assign(table(videos(30)), "ab", RolesConfig(sealed=20))


def test_shares_of_a_class_of_its_own(tried) -> None:
    tried("bad inputs")
    config = RolesConfig.model_validate({"by_class": {"a": {"sealed": 0.5}}})
    with pytest.raises(UserError, match="shares of their own"):
        assign(table(videos(30)), "ab", config)
    rows: list[Row] = [(str(number), "ab"[number % 2], None, f"v{number}") for number in range(4000)]
    assigned = assign(table(rows), "ab", config)
    assert len(assigned.where(Role.SEALED, label="a")) / 2000 == pytest.approx(0.5, abs=0.05)
    assert len(assigned.where(Role.SEALED, label="b")) / 2000 == pytest.approx(0.2, abs=0.05)


def test_groups_enter_the_fingerprint_of_roles() -> None:
    rows = videos(40)
    plain = [(identity, label, split, None) for identity, label, split, _ in rows]
    with_groups = assign(table(rows), "ab", RolesConfig()).table(table(rows))
    without = with_groups.set_column(with_groups.column_names.index("group"), "group", pa.nulls(200, pa.string()))
    assert fingerprint_roles(with_groups) != fingerprint_roles(without)
    assert fingerprint_roles(without) == fingerprint_roles(without.drop_columns(["group"]))
    assert assign(table(plain), "ab", RolesConfig()).table(table(plain))["group"].null_count == 200


def write_videos(root: Path, count: int = 24, frames: int = 4) -> list[tuple[Path, str, str]]:
    """Pictures class/video_frame.png: path, class, video."""
    written: list[tuple[Path, str, str]] = []
    for video in range(count):
        label = ("cat", "dog", "owl")[video % 3]
        for frame in range(frames):
            path = root / label / f"clip{video:02d}_{frame}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(picture(seed=100 * video + frame)))
            written.append((path, label, f"clip{video:02d}"))
    return written


def test_groups_of_folders_and_tables_are_the_same(tmp_path: Path) -> None:
    written = write_videos(tmp_path / "images")
    lines = [f"images/{label}/{path.name},{label},{video}" for path, label, video in written]
    (tmp_path / "list.csv").write_text("filepath,label,video\n" + "\n".join(lines) + "\n")
    columns = {
        "image": [path.read_bytes() for path, _, _ in written],
        "label": [label for _, label, _ in written],
        "video": [video for _, _, video in written],
    }
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    sources = [
        SourceConfig(path=Path("images"), group=r"/([^/]+)_\d+\.png$"),
        SourceConfig(kind="csv", path=Path("list.csv"), group="video"),
        SourceConfig(kind="parquet", path=Path("list.parquet"), group="video"),
    ]
    found = [dict(zip(c.column("example_id"), c.column("group"), strict=True)) for c in _catalogues(sources, tmp_path)]
    assert found[0] == found[1] == found[2]
    assert len(set(found[0].values())) == 24


def _catalogues(sources: list[SourceConfig], root: Path) -> list[Catalogue]:
    return [catalogue([source], root) for source in sources]


def test_a_round_keeps_groups_together(tmp_path: Path) -> None:
    write_videos(tmp_path, count=60, frames=3)
    source = {"path": ".", "group": r"([^/]+)_\d+\.png$"}
    config = DataConfig.model_validate({"source": source, "leaks": "allow"})
    made = assemble(config, TaskConfig(target="owl"), size=24, interpolation="bicubic", seed=0, root=tmp_path)
    found: dict[str, set[str]] = defaultdict(set)
    for row in made.roles.to_pylist():
        found[row["group"]].add(row["role"])
    assert len(found) == 60
    assert all(len(roles) == 1 for roles in found.values())


def test_a_picture_without_a_group_is_refused(tmp_path: Path, tried) -> None:
    tried("bad inputs", 4)
    write_videos(tmp_path / "images", count=3)
    with pytest.raises(UserError, match="names no group"):
        catalogue([SourceConfig(path=Path("images"), group=r"patient(\d+)")], tmp_path)
    (tmp_path / "list.csv").write_text("filepath,label,video\nimages/cat/clip00_0.png,cat,\n")
    for column in ("video", "patient"):
        with pytest.raises(UserError, match="names no group"):
            catalogue([SourceConfig(kind="csv", path=Path("list.csv"), group=column)], tmp_path)
    with pytest.raises(ValueError, match="no regular expression"):
        SourceConfig(path=Path("images"), group="(")
