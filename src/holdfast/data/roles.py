"""What each example serves as: base, constraint, dev, sealed or test, decided by its content and nothing else.

A content hash is turned into a number in [0, 1) and the number into a role. So the same file has the same role on
every machine and in every round, in whatever order files are read, and adding pictures moves no other picture.

Files that show the same picture, pixel by pixel, are one example: the strictest use that their splits ask for, or else
the role of the one with the smallest hash. It is counted once, and the others are reported.

Examples of one group (a video, a patient) have one role, drawn by the group's name in place of the content: otherwise
frames of one video would train and judge.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from holdfast.config import RolesConfig
from holdfast.data.catalogue import Catalogue, Problem, number_of
from holdfast.data.sources.files import split_role
from holdfast.data.task import Role
from holdfast.errors import UserError, nearest
from holdfast.files import fingerprint_bytes

if TYPE_CHECKING:  # roles are shared out without it; the table that a run keeps of them needs it
    import pyarrow as pa

# Where copies of one picture lie in several splits, the strictest use wins: a test picture is never trained on.
_STRICTEST = (Role.TEST, Role.SEALED, Role.DEV, Role.TRAIN, Role.BASE, None)
_CODES = {role: code for code, role in enumerate(Role)}
_DRAWN = (Role.BASE, Role.DEV, Role.SEALED, Role.TEST)


@dataclass(frozen=True)
class Assigned:
    """Rows of a catalogue that take part, with their roles. One row an example; further captions are in ``twins``."""

    rows: np.ndarray  # [n] int64, rows of the catalogue
    classes: tuple[str, ...]  # [n]
    ids: tuple[str, ...]  # [n]
    roles: tuple[Role, ...]  # [n]
    twins: dict[str, list[int]]  # id -> every row that shows it in the same file, one for each caption
    problems: list[Problem]
    pictures: tuple[str, ...] = ()  # [n] which picture each shows

    def where(self, *roles: Role, label: str | None = None) -> np.ndarray:
        """Positions with one of the roles, and of one class where it is given."""
        chosen = np.isin(self._role_codes, [_CODES[role] for role in roles])
        if label is not None:
            codes, names = self._class_codes
            chosen &= codes == names.get(label, -1)
        return np.flatnonzero(chosen)

    @cached_property
    def _role_codes(self) -> np.ndarray:
        return np.array([_CODES[role] for role in self.roles], dtype=np.int8)

    @cached_property
    def _class_codes(self) -> tuple[np.ndarray, dict[str, int]]:
        names = {name: code for code, name in enumerate(dict.fromkeys(self.classes))}
        return np.array([names[name] for name in self.classes], dtype=np.int64), names

    def without(self, ids: Collection[str], *roles: Role) -> Assigned:
        """The same less the examples with these ids that have one of the roles (default: training examples)."""
        dropped = roles or (Role.BASE, Role.TRAIN)
        kept = [p for p, item in enumerate(self.ids) if item not in ids or self.roles[p] not in dropped]
        return replace(
            self,
            rows=self.rows[kept],
            classes=tuple(self.classes[p] for p in kept),
            ids=tuple(self.ids[p] for p in kept),
            roles=tuple(self.roles[p] for p in kept),
            pictures=tuple(self.pictures[p] for p in kept),
        )

    def table(self, catalogue: Catalogue) -> pa.Table:
        """The roles as a table, sorted by id."""
        import pyarrow as pa

        schema = pa.schema(
            [
                pa.field("example_id", pa.string(), nullable=False),
                pa.field("class", pa.string(), nullable=False),
                pa.field("role", pa.string(), nullable=False),
                pa.field("source", pa.string(), nullable=False),
                pa.field("locator", pa.string(), nullable=False),
                pa.field("picture", pa.string(), nullable=False),  # hash of the decoded pixels
                pa.field("group", pa.string()),  # none where examples are independent
            ]
        )
        chosen = catalogue.table.take(self.rows)
        table = pa.table(
            {
                "example_id": list(self.ids),
                "class": list(self.classes),
                "role": [role.value for role in self.roles],
                "source": chosen["source"],
                "locator": chosen["locator"],
                "picture": list(self.pictures),
                "group": chosen["group"],
            }
        ).cast(schema)
        return table.sort_by("example_id")


def fingerprint_roles(table: pa.Table) -> str:
    """Fingerprint of who serves as what; where the files lie does not enter."""
    names = ["example_id", "class", "role"]
    if "group" in table.column_names and table["group"].null_count < len(table):
        names.append("group")
    rows = zip(*([value or "" for value in table[name].to_pylist()] for name in names), strict=True)
    return fingerprint_bytes(*("\t".join(row).encode() + b"\n" for row in sorted(rows)))


def assign(catalogue: Catalogue, classes: Sequence[str], config: RolesConfig) -> Assigned:
    """Give every example of the given classes its role; copies and contradictions are dropped and reported."""
    for name in config.by_class:
        if name not in catalogue.classes:
            raise UserError(
                f"[data.roles.by_class]: {name!r} is no class of the sources", do=nearest(name, catalogue.classes)
            )
    pictures = catalogue.pictures()
    rows, twins, problems = _one_row_a_picture(catalogue, pictures, set(classes))
    ids, labels = catalogue.column("example_id"), catalogue.column("class")
    splits = catalogue.column("split")
    roles: dict[int, Role] = {}
    filled: dict[str, set[Role]] = defaultdict(set)  # roles that a class's own splits fill
    shared: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        label, own = str(labels[row]), split_role(splits[row])
        if own is None:
            shared[label].append(row)
        else:
            roles[row] = own
            filled[label].add(own)
    groups = catalogue.column("group")
    together = [row for row in rows if groups[row] is not None]
    for label, members in shared.items():
        alone = [row for row in members if groups[row] is None]
        if alone:
            roles.update(_share_out(alone, ids, label, config, filled[label]))
    roles.update(_share_out_groups(together, groups, labels, roles, config, filled, problems))
    return Assigned(
        np.array(rows, dtype=np.int64),
        tuple(str(labels[row]) for row in rows),
        tuple(str(ids[row]) for row in rows),
        tuple(roles[row] for row in rows),
        twins,
        problems,
        tuple(pictures[row] for row in rows),
    )


def _one_row_a_picture(
    catalogue: Catalogue, pictures: Sequence[str], classes: set[str]
) -> tuple[list[int], dict[str, list[int]], list[Problem]]:
    ids, labels = catalogue.column("example_id"), catalogue.column("class")
    splits, locators = catalogue.column("split"), catalogue.column("locator")
    copies: dict[str, list[int]] = defaultdict(list)
    for row, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        if label in classes:
            copies[picture].append(row)
    kept: list[int] = []
    twins: dict[str, list[int]] = {}
    problems: list[Problem] = []
    for group in copies.values():
        names = sorted({str(labels[row]) for row in group})
        where = str(locators[group[0]])
        if len(names) > 1:
            # Nobody can say which label is the true one, so it can neither train nor judge.
            problems.append(
                Problem("contradicting labels", where, f"the same picture is {' and '.join(names)}: left out")
            )
            continue
        best = min(group, key=lambda row: (_STRICTEST.index(split_role(splits[row])), str(ids[row])))
        kept.append(best)
        twins[str(ids[best])] = [row for row in group if locators[row] == locators[best]]
        for row in group:
            if locators[row] != locators[best]:
                problems.append(_copy_problem(str(locators[row]), str(locators[best]), splits[row], splits[best]))
    return kept, twins, problems


def _copy_problem(dropped: str, kept: str, split: str | None, kept_split: str | None) -> Problem:
    if split_role(split) == split_role(kept_split):
        return Problem("duplicate", dropped, f"the same picture as {kept}, which is kept")
    return Problem(
        "copy in another split", dropped, f"in {split or 'no split'}; {kept} in {kept_split} is kept, this one dropped"
    )


def _share_out(
    rows: list[int], ids: Sequence[str | None], label: str, config: RolesConfig, filled: set[Role]
) -> dict[int, Role]:
    """Roles of the examples of one class that bring none along, among those its own splits do not fill."""
    own = config.shares_of(label)
    shares = {role: own[role.value] for role in _DRAWN if role not in filled}
    counts = {role: share for role, share in shares.items() if isinstance(share, int)}
    if counts and sum(counts.values()) >= len(rows):
        raise UserError(
            f"the class {label!r} has too few images for the roles asked for",
            expected=f"more than {sum(counts.values())} ("
            + ", ".join(f"{role.value} {count}" for role, count in counts.items())
            + ", and some to train on)",
            found=f"{len(rows)}",
            do="lower the counts in [data.roles], or add images",
        )
    ranked = sorted(rows, key=lambda row: number_of(str(ids[row]), "rank"))
    roles: dict[int, Role] = {}
    start = 0
    for role, count in counts.items():
        roles.update(dict.fromkeys(ranked[start : start + count], role))
        start += count
    for row in ranked[start:]:
        number, upper = number_of(str(ids[row])), 0.0
        roles[row] = Role.TRAIN
        for role, share in shares.items():
            if role in counts:
                continue
            upper += share
            if number < upper:
                roles[row] = role
                break
    return roles


def _share_out_groups(
    rows: list[int],
    groups: Sequence[str | None],
    labels: Sequence[str | None],
    own: dict[int, Role],
    config: RolesConfig,
    filled: dict[str, set[Role]],
    problems: list[Problem],
) -> dict[int, Role]:
    """One role for each group: the strictest that its examples' splits ask for, else one drawn by its name."""
    members: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        members[str(groups[row])].append(row)
    shares = {label: config.shares_of(label) for label in {str(labels[row]) for row in rows}}
    if any(isinstance(share, int) for own in shares.values() for share in own.values()):
        raise UserError(
            "[data.roles] counts images, and the data have groups",
            expected="shares such as 0.2: a group has one role as a whole",
            do="give base, dev, sealed and test as fractions",
        )
    roles: dict[int, Role] = {}
    for name, group in members.items():
        asked = {own[row] for row in group if row in own}
        if asked:
            role = min(asked, key=_STRICTEST.index)
            if len(asked) > 1 or any(row not in own for row in group):
                problems.append(Problem("group in several splits", name, f"all of it serves as {role.value}"))
        else:
            classes = sorted({str(labels[row]) for row in group})
            if any(shares[label] != shares[classes[0]] for label in classes):
                raise UserError(
                    f"the group {name} holds {' and '.join(classes[:3])}, which have shares of their own",
                    expected="the same shares for classes that share a group: it has one role as a whole",
                    do="leave these classes out of [data.roles.by_class]",
                )
            taken = set[Role]().union(*(filled[label] for label in classes))
            role = _drawn(number_of(name, "group"), shares[classes[0]], taken)
        roles.update(dict.fromkeys(group, role))
    return roles


def _drawn(number: float, shares: Mapping[str, int | float], filled: set[Role]) -> Role:
    """The role that a number in [0, 1) stands for."""
    upper = 0.0
    for role in _DRAWN:
        if role not in filled:
            upper += shares[role.value]
            if number < upper:
                return role
    return Role.TRAIN


def count_roles(assigned: Assigned) -> dict[str, dict[str, int]]:
    """Class -> role -> number of examples."""
    counts = Counter(zip(assigned.classes, (role.value for role in assigned.roles), strict=True))
    table: dict[str, dict[str, int]] = defaultdict(dict)
    for (label, role), count in counts.items():
        table[label][role] = count
    return dict(table)
