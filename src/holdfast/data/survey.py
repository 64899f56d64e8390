"""What the sources of a round hold and what each example serves as: all that is known before a picture is decoded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import DataConfig, RolesConfig, SourceConfig, TaskConfig
from holdfast.data.catalogue import Catalogue
from holdfast.data.prompts import class_prompts, read_prompts
from holdfast.data.roles import Assigned, assign
from holdfast.data.sources import catalogue
from holdfast.data.task import Role, TaskSpec
from holdfast.errors import UserError, nearest
from holdfast.shared import once


@dataclass(frozen=True)
class Survey:
    """What the sources hold and what each example serves as. Pictures were decoded for their hashes alone."""

    config: DataConfig
    task: TaskConfig
    main: Catalogue
    pairs: Catalogue
    negatives: Catalogue
    spec: TaskSpec
    assigned: Assigned

    @property
    def sealed(self) -> list[tuple[str, str, str]]:
        """Id, class and picture of every sealed example; knowing them opens nothing."""
        found = self.assigned
        return sorted((found.ids[p], found.classes[p], found.pictures[p]) for p in found.where(Role.SEALED))

    @property
    def grouped(self) -> bool:
        """Whether a source names groups."""
        return any(group is not None for group in self.main.column("group"))

    @property
    def sealed_units(self) -> list[tuple[str, str, str]]:
        """One sealed example for each class and group: what a plan may count on."""
        found, groups = self.assigned, self.main.column("group")
        first: dict[tuple[str, str], tuple[str, str, str]] = {}
        for p in found.where(Role.SEALED):
            key = (found.classes[p], groups[int(found.rows[p])] or f"image {found.ids[p]}")
            first.setdefault(key, (found.ids[p], found.classes[p], found.pictures[p]))
        return sorted(first.values())


def survey(config: DataConfig, task: TaskConfig, *, root: Path, main: Catalogue | None = None) -> Survey:
    """Read the sources' names and content hashes and share out the roles; ``main`` where they were read already."""
    limit = config.bad_image_limit
    given, main = main, main or _catalogue(config.sources, root, limit)
    spec = task_spec(task, main.classes, prompts_file=None if config.prompts is None else root / config.prompts)
    assigned = _assigned(config, main, spec.classes, None if given is not None else root)
    check_roles(assigned, spec.classes, config.roles)
    pairs = _catalogue(config.pairs, root, limit)
    negatives = _catalogue(config.negative_sources, root, limit)
    return Survey(config, task, main, pairs, negatives, spec, assigned)


def _catalogue(sources: Sequence[SourceConfig], root: Path, limit: float) -> Catalogue:
    """Jobs of a study read the same sources: their files are hashed once."""
    return once(_key(sources, root, limit), lambda: catalogue(sources, root, limit=limit))


def _assigned(config: DataConfig, main: Catalogue, classes: tuple[str, ...], root: Path | None) -> Assigned:
    """The roles; ``root`` is None where the catalogue was read by somebody else, and may hold anything."""
    if root is None:
        return assign(main, classes, config.roles)
    key = (_key(config.sources, root, config.bad_image_limit), classes, config.roles.model_dump_json())
    return once(("roles", *key), lambda: assign(main, classes, config.roles))


def _key(sources: Sequence[SourceConfig], root: Path, limit: float) -> Hashable:
    return "catalogue", tuple(source.model_dump_json() for source in sources), root.resolve(), limit


def task_spec(task: TaskConfig, known: Sequence[str], *, prompts_file: Path | None = None) -> TaskSpec:
    """The label space and its prompts; names that the data does not know are errors that name the nearest."""
    if not known:
        raise UserError(
            "the sources have no classes",
            expected="folders named after classes, or a table with the column label",
            do="look at what was understood with `holdfast data SOURCE`",
        )
    for name in (task.target, *(task.protected or ()), *task.ignored):
        if name not in known:
            raise UserError(f"the class {name!r} has no images in the sources", do=nearest(name, known))
    for name in task.names:
        if name not in known:
            raise UserError(f"[task.names]: {name!r} is no class of the sources", do=nearest(name, known))
    protected = task.protected
    if protected is None:
        protected = tuple(name for name in known if name != task.target and name not in task.ignored)
    if not protected:
        raise UserError(
            "there is nothing to protect",
            expected="at least one class beside the target",
            found=f"only {task.target!r}",
        )
    classes = (*protected, task.target)
    given = None if prompts_file is None else read_prompts(prompts_file, known)
    return TaskSpec(task.target, protected, class_prompts(classes, task.templates, task.names, given), task.ignored)


def check_roles(assigned: Assigned, classes: Sequence[str], config: RolesConfig) -> None:
    """Every class needs an image in every role that is in use."""
    counts: dict[str, dict[Role, int]] = {name: {} for name in classes}
    for name, role in zip(assigned.classes, assigned.roles, strict=True):
        counts[name][role] = counts[name].get(role, 0) + 1
    used = [Role.TRAIN, Role.DEV]
    used += [role for role in (Role.SEALED, Role.TEST) if getattr(config, role.value) or assigned.where(role).size]
    for name, found in counts.items():
        total = sum(found.values())
        if total < 2:
            images = "one image" if total else "no images"
            raise UserError(
                f"the class {name!r} has {images}",
                expected="at least two, one to train on and one to judge by; hundreds for a certificate",
                do="add images, or leave the class out with `ignored` in [task]",
            )
        for role in used:
            if not found.get(role):
                raise UserError(
                    f"the class {name!r} has no image for the role {role.value!r}",
                    expected="at least one image of every class in every role",
                    found=", ".join(f"{count} {item.value}" for item, count in found.items()),
                    do=f"add images, or raise `{role.value}` in [data.roles] (a whole number means images a class)",
                )
