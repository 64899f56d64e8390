"""The first ROUND.toml for a user's own pictures: what was found, with comments, nothing guessed silently."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Listing
from holdfast.data.round import Role
from holdfast.data.sources import guess_source, list_source
from holdfast.data.sources.files import split_role
from holdfast.errors import UserError, nearest


@dataclass(frozen=True)
class Findings:
    """What a source holds, as far as its names and tables tell: no picture is opened."""

    source: SourceConfig
    classes: dict[str, int]  # class -> images, in order of appearance
    splits: dict[str, int]
    captions: int
    shared: dict[str, int]  # class -> images without a split of their own, which roles are drawn from

    @property
    def brings_sealed(self) -> bool:
        """Whether the source's own splits say which images are sealed."""
        return any(split_role(name or None) is Role.SEALED for name in self.splits)

    @property
    def smallest(self) -> str:
        """The class with the fewest images."""
        return min(self.classes, key=lambda name: (self.classes[name], name))


@dataclass(frozen=True)
class ChosenPlan:
    """Shares and margins of a round, and why they were chosen."""

    dev: float = 0.2
    sealed: float = 0.2
    test: float = 0.2
    margin: float | dict[str, float] = 0.02
    confidence: float = 0.95
    chance: float | None = None  # that the round passes, as far as it is known
    reasons: tuple[str, ...] = ()


DEFAULT_PLAN = ChosenPlan()


def inspect(source: str) -> Findings:
    """Look at a folder, a table or another source and count what it names."""
    config = guess_source(source)
    listing = list_source(config, Path())
    classes = Counter(entry.label for entry in listing.entries if entry.label is not None)
    _check_classes(listing, classes)
    return Findings(
        config,
        dict(classes),
        dict(Counter(entry.split or "" for entry in listing.entries)),
        sum(entry.caption is not None for entry in listing.entries),
        _shared_out(listing, classes),
    )


def _shared_out(listing: Listing, classes: Counter[str]) -> dict[str, int]:
    shared = Counter(entry.label for entry in listing.entries if split_role(entry.split) is None)
    return {name: shared[name] for name in classes}


def _check_classes(listing: Listing, classes: Counter[str]) -> None:
    if len(classes) < 2:
        raise UserError(
            f"{listing.name} has {'one class' if classes else 'no classes'}",
            expected="at least two: one to improve and one to protect. class/picture.jpg or split/class/picture.jpg, "
            "or a table with the columns filepath,title,label[,split]",
            found=", ".join(classes) or f"{len(listing.entries)} pictures without a class",
        )
    for name, count in classes.items():
        if count < 2:
            raise UserError(
                f"the class {name!r} has one image",
                expected="at least two, one to train on and one to judge by; hundreds for a certificate",
                do="add images, or move its folder out of the way",
            )


def round_text(
    findings: Findings,
    *,
    target: str | None = None,
    relative_to: Path | None = None,
    plan: ChosenPlan = DEFAULT_PLAN,
) -> str:
    """A commented ROUND.toml. Without a target the smallest class is proposed in a comment and must be confirmed."""
    if target is not None and target not in findings.classes:
        raise UserError(f"the class {target!r} has no images", do=nearest(target, findings.classes))
    data = _data_section(findings, relative_to, plan)
    return "\n".join([_task_section(findings, target), data, _OTHER_SECTIONS + _certify_section(plan)])


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML basic string


def _task_section(findings: Findings, target: str | None) -> str:
    counts = "\n".join(f"#   {name}: {count} images" for name, count in findings.classes.items())
    if target is None:
        choice = (
            f"# The class to improve. Nobody but you knows which: {_quote(findings.smallest)} has the fewest images.\n"
            f"# target = {_quote(findings.smallest)}"
        )
        others = [name for name in findings.classes if name != findings.smallest]
    else:
        choice = f"target = {_quote(target)}"
        others = [name for name in findings.classes if name != target]
    return f"""# A round: improve one class, keep every other. Run it with `holdfast develop ROUND.toml`.
# Keys that are left out have their defaults; `holdfast develop --help` says what each of them means.
seed = 0

[task]
# Found in the data:
{counts}
{choice}
# What must not get worse. Left out: every class but the target and the ignored.
# protected = [{", ".join(_quote(name) for name in others)}]
# Classes that take no part at all.
# ignored = []
# The sentence a class is described with; a/an before {{}} agrees with the word.
template = "a photo of a {{}}"
# Better words for a class than its name:
# [task.names]
# {_quote(others[0])} = {_quote(others[0].replace("_", " "))}
"""


def _data_section(findings: Findings, relative_to: Path | None, plan: ChosenPlan) -> str:
    source = findings.source
    fields = [f"kind = {_quote(source.kind)}"]
    if source.path is not None:
        path = source.path
        if relative_to is not None:
            path = path.resolve()
            if path.is_relative_to(relative_to.resolve()):
                path = path.relative_to(relative_to.resolve())
        fields.append(f"path = {_quote(str(path))}")
    splits = ", ".join(f"{name or 'none'} {count}" for name, count in findings.splits.items())
    own = {split_role(name or None) for name in findings.splits}
    drawn = {Role.BASE: 0.0, Role.DEV: plan.dev, Role.SEALED: plan.sealed, Role.TEST: plan.test}
    shares = "\n".join(_share_line(role, share, role in own) for role, share in drawn.items())
    why = "".join(f"# {line}\n" for reason in plan.reasons for line in textwrap.wrap(reason, 110))
    texts = (
        "# Captions of the target's images are used as they stand."
        if findings.captions
        else "# There are no captions: the class's sentence stands in for them."
    )
    return f"""[data]
# Splits found: {splits}.
source = {{ {", ".join(fields)} }}
{texts}
# More pictures of the target with captions (a table with filepath,title):
# pairs = [{{ kind = "csv", path = "more.csv" }}]
# Pictures to contrast with. Left out: the protected classes with their sentences.
# negatives = {{ kind = "folder", path = "other-pictures" }}
# Images of each protected class to train under. Left out: all there are.
# constraint_images = 1000

[data.roles]
# How images without a split of their own are shared out, by their content: the rest is trained on.
# A fraction is stable when images are added; a whole number is that many images of each class.
{why}{shares}
"""


_MEANING = {
    Role.BASE: "for making the old model with `holdfast tune`",
    Role.DEV: "for looking and choosing",
    Role.SEALED: "opened by the certificate and by nothing else",
    Role.TEST: "scored once, after the choice",
}


def _share_line(role: Role, share: float, own: bool) -> str:
    if own:
        return f"# {role.value}: the source brings its own ({_MEANING[role]})"
    return f"{role.value} = {share}  # {_MEANING[role]}"


_OTHER_SECTIONS = """[model]
# The old model: a holdfast model folder,
# start = "base-model"
# or an OpenCLIP architecture with its weights.
architecture = "ViT-B-16"
weights = "openai"

[method]
name = "holdfast"
# form = "published"  # the algorithm as the paper has it; the default adds what keeps classes better (docs/research.md)

[train]
steps = 2000
batch = 256

[evaluate]
every = 200

"""


def _certify_section(plan: ChosenPlan) -> str:
    known = f"# Chance that the round passes (`holdfast plan` counts it exactly): about {plan.chance or 0:.0%}.\n"
    chance = "" if plan.chance is None else known
    if isinstance(plan.margin, dict):
        items = ", ".join(f"{_quote(name)} = {margin:g}" for name, margin in plan.margin.items())
        margin = f"{{ {items} }}"
    else:
        margin = f"{plan.margin:g}"
    return f"""[certify]
# The loss of accuracy you are ready to accept on any protected class, and how sure you want to be.
{chance}margin = {margin}
confidence = {plan.confidence:g}
"""
