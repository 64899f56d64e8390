"""From sources to a round: the label space, the prompts, and every set that training, choosing and judging read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from holdfast.config import DataConfig, RolesConfig, SourceConfig, TaskConfig
from holdfast.data.catalogue import Catalogue, Problem, check_limit, join
from holdfast.data.dedup.leaks import find_leaks, pictures_of, refuse_leaks, repeated_sealed
from holdfast.data.pixels import Gathered, gather
from holdfast.data.prompts import fill, words_of
from holdfast.data.roles import Assigned, assign, fingerprint_roles
from holdfast.data.round import LabelledSet, PairSet, RoundData, label_index
from holdfast.data.sources import catalogue
from holdfast.data.sources.files import split_role
from holdfast.data.survey import Survey, check_roles, survey
from holdfast.data.task import Role, TaskSpec
from holdfast.errors import UserError, nearest
from holdfast.files import fingerprint_json, image_key

if TYPE_CHECKING:
    import pyarrow as pa

NEUTRAL_PROMPT = "a photo"  # the text of a picture of which nothing is known


@dataclass(frozen=True)
class Assembled:
    """A round's data, what each example serves as, and what was found wrong on the way."""

    data: RoundData
    roles: pa.Table
    problems: list[Problem]
    fingerprint: str
    check_leaks: Callable[[], None]  # refuses sealed pictures with near copies in training, unless that is allowed
    check_sealed: Callable[[], None]  # refuses sealed files that the catalogue could not decode
    pictures: Mapping[str, str] = field(default_factory=dict[str, str])  # example id -> hash of the pixels


@dataclass(frozen=True)
class _Pairs:
    """Rows of the catalogue with a text each, before anything is decoded."""

    rows: list[int]
    texts: list[str]
    ids: list[str]


def assemble(
    config: DataConfig, task: TaskConfig, *, size: int, interpolation: str, seed: int, root: Path
) -> Assembled:
    """Read the sources, share out the roles and decode what training and choosing need."""
    return decode(survey(config, task, root=root), size=size, interpolation=interpolation, seed=seed)


def decode(surveyed: Survey, *, size: int, interpolation: str, seed: int) -> Assembled:
    """Decode what training and choosing need.

    Sealed and test pictures are decoded when their set is opened, and not before. ``seed`` draws the constraint and
    target images where fewer are asked for than there are; roles do not depend on it.
    """
    config, task, spec, assigned = surveyed.config, surveyed.task, surveyed.spec, surveyed.assigned
    main, pairs, negatives = surveyed.main, surveyed.pairs, surveyed.negatives
    limit = config.bad_image_limit
    everything = join([main, pairs, negatives])
    problems = [*everything.problems, *assigned.problems]
    held_out = {assigned.pictures[p] for p in assigned.where(Role.DEV, Role.SEALED, Role.TEST)}
    outside_rows = np.arange(len(main), len(everything))
    if config.leaks == "drop":
        leaked = near_copies(everything, assigned, outside_rows)
        problems.extend(leaked.values())
        assigned = assigned.without(leaked)
        # Pairs and negatives with such a picture are left out as exact copies are.
        shown = everything.pictures()
        held_out.update(shown[row] for row, item in enumerate(everything.column("example_id")) if item in leaked)
        check_roles(assigned, spec.classes, config.roles)
    if config.leaks != "allow":
        repeated = near_copies_of_sealed(main, assigned)
        problems.extend(repeated.values())
        assigned = assigned.without(repeated, Role.SEALED)
        check_roles(assigned, spec.classes, config.roles)

    chosen = {
        label: _draw(assigned, label, config.target_images if label == spec.target else config.constraint_images, seed)
        for label in spec.classes
    }
    target = _target_pairs(main, assigned, chosen[spec.target], spec)
    outside = _outside_pairs(pairs, spec.prompts[-1][0], held_out, problems)
    target = _Pairs(
        target.rows + [len(main) + row for row in outside.rows], target.texts + outside.texts, target.ids + outside.ids
    )
    constraint = np.concatenate([chosen[label] for label in spec.protected])
    if config.negative_sources:
        blocked = held_out | _pictures_at(everything, target.rows)
        contrast = _negative_pairs(negatives, spec, task.templates, blocked, problems)
        contrast = _Pairs([len(main) + len(pairs) + row for row in contrast.rows], contrast.texts, contrast.ids)
    else:
        contrast = _prompted(assigned, constraint, spec)

    dev = assigned.where(Role.DEV)
    wanted = [assigned.rows[constraint], assigned.rows[dev], np.array(target.rows), np.array(contrast.rows)]
    rows, inverse = np.unique(np.concatenate(wanted).astype(np.int64), return_inverse=True)
    gathered = gather(everything, rows, size, interpolation)
    check_limit(gathered.problems, len(rows), limit)
    problems.extend(gathered.problems)
    places = np.split(gathered.rows[inverse], np.cumsum([len(item) for item in wanted])[:-1])

    def opener(role: Role) -> Callable[[], LabelledSet]:
        return lambda: _open(main, assigned, role, spec, size, interpolation, limit)

    data = RoundData(
        tasks=spec,
        target=_pair_set(gathered, places[2], target, "target pairs"),
        negatives=_pair_set(gathered, places[3], contrast, "negatives"),
        constraint=_labelled_set(gathered, places[0], assigned, constraint, spec.classes),
        dev=_labelled_set(gathered, places[1], assigned, dev, spec.classes),
        open_test=opener(Role.TEST),
        open_sealed=opener(Role.SEALED),
        sealed_ids=tuple(sorted(assigned.ids[p] for p in assigned.where(Role.SEALED))),
    )
    _check_each_class(data.constraint, spec.protected, "constraint")
    _check_each_class(data.dev, spec.classes, "dev")
    roles = assigned.table(main)

    def check_leaks() -> None:
        if config.leaks == "refuse":
            training = np.concatenate([assigned.rows[assigned.where(Role.BASE, Role.TRAIN)], outside_rows])
            sealed = assigned.rows[assigned.where(Role.SEALED)]
            refuse_leaks(pictures_of(everything, training), pictures_of(main, sealed))

    pictures = dict(zip(map(str, everything.column("example_id")), everything.pictures(), strict=True))
    return Assembled(
        data,
        roles,
        problems,
        _fingerprint(data, roles),
        check_leaks,
        lambda: _check_sealed_files(main, assigned, size, interpolation),
        pictures,
    )


def near_copies(everything: Catalogue, assigned: Assigned, outside_rows: np.ndarray) -> dict[str, Problem]:
    """Training pictures that are nearly dev, sealed or test pictures: content hash -> what to report."""
    training = np.concatenate([assigned.rows[assigned.where(Role.BASE, Role.TRAIN)], outside_rows])
    held_out = assigned.rows[assigned.where(Role.DEV, Role.SEALED, Role.TEST)]
    ours, theirs = pictures_of(everything, training), pictures_of(everything, held_out)
    return {
        ours.ids[match.a]: Problem("near copy", ours.names[match.a], f"of {theirs.names[match.b]}, held out: left out")
        for match in find_leaks(ours, theirs)
        if match.kind != "exact"
    }


def near_copies_of_sealed(main: Catalogue, assigned: Assigned) -> dict[str, Problem]:
    """Sealed pictures that are nearly dev pictures, or nearly another sealed one: content hash -> what to report."""
    sealed = assigned.rows[assigned.where(Role.SEALED)]
    if not len(sealed):
        return {}
    ours, dev = pictures_of(main, sealed), pictures_of(main, assigned.rows[assigned.where(Role.DEV)])
    return {
        ours.ids[item.row]: Problem(
            f"sealed near copy of a {item.among} picture", ours.names[item.row], f"of {item.other}: not counted"
        )
        for item in repeated_sealed(ours, dev)
    }


def _pictures_at(source: Catalogue, rows: Sequence[int]) -> set[str]:
    shown = source.pictures()
    return {shown[row] for row in rows}


def _draw(assigned: Assigned, label: str, count: int | None, seed: int) -> np.ndarray:
    """Training images of one class: all, or ``count`` drawn by seed from the ids, whatever the order of the files."""
    positions = sorted(assigned.where(Role.TRAIN, label=label), key=lambda position: assigned.ids[position])
    if count is None or count >= len(positions):
        return np.array(positions, dtype=np.int64)
    generator = np.random.default_rng([seed, zlib.crc32(label.encode())])
    return np.array(positions, dtype=np.int64)[generator.permutation(len(positions))[:count]]


def _target_pairs(main: Catalogue, assigned: Assigned, positions: np.ndarray, spec: TaskSpec) -> _Pairs:
    """The target's own images with every caption they have, or else with a prompt of the class."""
    captions = main.column("caption")
    result = _Pairs([], [], [])
    for position in positions:
        identity = assigned.ids[position]
        for row in assigned.twins[identity]:
            result.rows.append(row)
            result.texts.append(captions[row] or _prompt(spec.prompts[-1], identity))
            result.ids.append(identity)
    return result


def _prompt(prompts: tuple[str, ...], identity: str) -> str:
    """One of a class's sentences, the same one each time for the same picture."""
    return prompts[int(identity[:8], 16) % len(prompts)]


def _outside_pairs(source: Catalogue, prompt: str, held_out: set[str], problems: list[Problem]) -> _Pairs:
    """Further pairs of the target. A picture that also judges is dropped and reported."""
    result = _Pairs([], [], [])
    for row, identity, caption, _ in _usable(source, held_out, problems):
        result.rows.append(row)
        result.texts.append(caption or prompt)
        result.ids.append(identity)
    return result


def _negative_pairs(
    source: Catalogue, spec: TaskSpec, templates: Sequence[str], blocked: set[str], problems: list[Problem]
) -> _Pairs:
    """Pairs to contrast with: their captions, else a sentence with their class, else a neutral one."""
    labels = source.column("class")
    result = _Pairs([], [], [])
    for row, identity, caption, locator in _usable(source, blocked, problems):
        label = labels[row]
        if label == spec.target:
            problems.append(Problem("target among negatives", locator, "left out"))
            continue
        result.rows.append(row)
        result.texts.append(caption or (fill(templates[0], words_of(label)) if label else NEUTRAL_PROMPT))
        result.ids.append(identity)
    return result


def _usable(source: Catalogue, blocked: set[str], problems: list[Problem]) -> list[tuple[int, str, str | None, str]]:
    """Rows that may be trained on, each (picture, caption) once."""
    result: list[tuple[int, str, str | None, str]] = []
    seen: set[tuple[str, str | None]] = set()
    columns = (source.column(name) for name in ("example_id", "caption", "locator", "split"))
    pictures = source.pictures()
    for row, (given, caption, place, split) in enumerate(zip(*columns, strict=True)):
        identity, locator, picture = str(given), str(place), pictures[row]
        if split_role(split) in (Role.DEV, Role.TEST, Role.SEALED):
            problems.append(Problem("held-out pair", locator, f"its source calls it {split}: not trained on"))
        elif picture in blocked:
            problems.append(Problem("leak", locator, "the same picture is a target or held-out image: left out"))
        elif (picture, caption) in seen:
            problems.append(Problem("duplicate", locator, "the same picture with the same text"))
        else:
            seen.add((picture, caption))
            result.append((row, identity, caption, locator))
    return result


def _prompted(assigned: Assigned, positions: np.ndarray, spec: TaskSpec) -> _Pairs:
    index = label_index(spec.classes)
    texts = [_prompt(spec.prompts[index[assigned.classes[p]]], assigned.ids[p]) for p in positions]
    return _Pairs([int(assigned.rows[p]) for p in positions], texts, [assigned.ids[p] for p in positions])


def _pair_set(gathered: Gathered, places: np.ndarray, pairs: _Pairs, what: str) -> PairSet:
    good = np.flatnonzero(places >= 0)
    if not len(good):
        raise UserError(f"there are no {what} left to train on", do="look at the sources with `holdfast data SOURCE`")
    return PairSet(
        gathered.pixels, places[good], tuple(pairs.texts[p] for p in good), tuple(pairs.ids[p] for p in good)
    )


def _labelled_set(
    gathered: Gathered, places: np.ndarray, assigned: Assigned, positions: np.ndarray, classes: Sequence[str]
) -> LabelledSet:
    good = np.flatnonzero(places >= 0)
    index = label_index(classes)
    labels = np.array([index[assigned.classes[positions[p]]] for p in good], dtype=np.int64)
    return LabelledSet(gathered.pixels, places[good], labels, tuple(assigned.ids[positions[p]] for p in good))


def _open(
    main: Catalogue, assigned: Assigned, role: Role, spec: TaskSpec, size: int, interpolation: str, limit: float
) -> LabelledSet:
    positions = assigned.where(role)
    if not len(positions):
        raise UserError(f"no images have the role {role.value!r}", do=f"give `{role.value}` a share in [data.roles]")
    gathered = gather(main, assigned.rows[positions], size, interpolation)
    if role == Role.SEALED:
        do = "restore the files and go on with --resume, or take them out and begin a new run"
        _refuse_unreadable_sealed(gathered.problems, len(positions), do)
    check_limit(gathered.problems, len(positions), limit)
    result = _labelled_set(gathered, gathered.rows, assigned, positions, spec.classes)
    _check_each_class(result, spec.classes, role.value)
    return result


def _check_sealed_files(main: Catalogue, assigned: Assigned, size: int, interpolation: str) -> None:
    """Sealed files that the catalogue could not decode are named before anything is trained, and not after it."""
    known = main.column("picture")
    if not any(known):  # a source that does not say which picture a file shows
        return
    sealed = assigned.rows[assigned.where(Role.SEALED)]
    doubtful = np.array([row for row in sealed if not known[row]], dtype=np.int64)
    if len(doubtful):
        bad = gather(main, doubtful, size, interpolation).problems
        _refuse_unreadable_sealed(bad, len(sealed), "replace the files or take them out, and begin again")


def _refuse_unreadable_sealed(bad: Sequence[Problem], total: int, do: str) -> None:
    if not bad:
        return
    shown = "; ".join(f"{item.where} ({item.detail})" for item in bad[:5]) + ("; …" if len(bad) > 5 else "")
    raise UserError(
        f"{len(bad)} of {total} sealed pictures cannot be read",
        expected="every sealed picture: the claim is about all of them",
        found=shown,
        do=f"{do}; no query was spent",
    )


def _check_each_class(examples: LabelledSet, classes: Sequence[str], what: str) -> None:
    for index, name in enumerate(classes):
        if not len(examples.of_class(index)):
            raise UserError(f"no {what} image of the class {name!r} can be read", do="replace the broken files")


def _fingerprint(data: RoundData, roles: pa.Table) -> str:
    """Fingerprint of everything that was drawn and said, and of who serves as what."""
    spec = data.tasks
    return fingerprint_json(
        {
            "classes": spec.classes,
            "prompts": spec.prompts,
            "roles": fingerprint_roles(roles),
            "target": sorted(zip(data.target.ids, data.target.texts, strict=True)),
            "negatives": sorted(zip(data.negatives.ids, data.negatives.texts, strict=True)),
            "constraint": sorted(data.constraint.ids),
        }
    )


def _not_sealed(
    main: Catalogue, assigned: Assigned, positions: np.ndarray, sealed: Collection[str], problems: list[Problem]
) -> np.ndarray:
    """The positions less those of sealed images, which are counted."""
    locators = main.column("locator")
    kept: list[int] = []
    for position in positions:
        if image_key(assigned.ids[position]) in sealed or image_key(assigned.pictures[position]) in sealed:
            where = str(locators[assigned.rows[position]])
            problems.append(Problem("sealed image left out", where, "only a certificate opens it"))
        else:
            kept.append(int(position))
    if len(positions) and not kept:
        raise UserError(
            f"all {len(positions)} images are sealed from this model",
            expected="images that its rounds have not sealed",
            do="evaluate dev or test images (--role), or other images; `holdfast certify RUN` queries sealed ones",
        )
    return np.array(kept, dtype=np.int64)


def labelled(
    sources: Sequence[SourceConfig],
    classes: Sequence[str],
    *,
    size: int,
    interpolation: str,
    root: Path,
    roles: Collection[Role] | None = None,
    roles_config: RolesConfig | None = None,
    limit: float = 0.01,
    missing_ok: bool = False,
    drop_leaks: bool = False,
    sealed: Collection[str] = (),
    problems: list[Problem] | None = None,
) -> LabelledSet:
    """Labelled examples of the given classes: all of them, or those with one of the given roles.

    ``holdfast tune`` asks for the base role, ``holdfast evaluate`` for everything a source holds. Examples of other
    classes are left out and counted in ``problems``; a class without images is an error unless ``missing_ok``. With
    ``drop_leaks`` (``leaks = "drop"`` in [data]) near copies of held-out pictures are not trained on. ``sealed`` are
    keys of images that are not opened (:func:`holdfast.files.image_key` of their id, or of their picture).
    """
    found: list[Problem] = [] if problems is None else problems
    main = catalogue(sources, root, limit=limit)
    for name in classes:
        if name not in main.classes and not missing_ok:
            raise UserError(f"the class {name!r} has no images in the sources", do=nearest(name, main.classes))
    for name in main.classes:
        if name not in classes:
            found.append(Problem("class left out", name))
    assigned = assign(main, classes, roles_config or RolesConfig(base=0.0, dev=0.0, sealed=0.0, test=0.0))
    if drop_leaks:
        leaked = near_copies(main, assigned, np.zeros(0, np.int64))
        found.extend(leaked.values())
        assigned = assigned.without(leaked)
    positions = assigned.where(*(Role if roles is None else roles))
    if sealed:
        positions = _not_sealed(main, assigned, positions, sealed, found)
    if not len(positions):
        wanted = "any role" if roles is None else " or ".join(sorted(roles))
        raise UserError(f"no images have {wanted}", do="give the role a share in [data.roles]")
    gathered = gather(main, assigned.rows[positions], size, interpolation)
    check_limit(gathered.problems, len(positions), limit)
    found.extend([*main.problems, *assigned.problems, *gathered.problems])
    result = _labelled_set(gathered, gathered.rows, assigned, positions, classes)
    if not missing_ok:
        _check_each_class(result, classes, "usable")
    return result
