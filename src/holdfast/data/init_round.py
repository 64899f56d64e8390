"""The first ROUND.toml for a user's own pictures, and the TUNE.toml of its old model where there is none yet."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.config import ModelConfig, RolesConfig, SourceConfig
from holdfast.data.catalogue import Catalogue, Listing, Problem
from holdfast.data.sources import guess_source, list_source
from holdfast.data.sources.files import split_role
from holdfast.data.sources.folder import NO_PICTURES
from holdfast.data.task import Role
from holdfast.errors import UserError, nearest

BASE = Path("base")  # the run folder of TUNE.toml, as its comment has it
FEW = 2  # images of the target that the old model is tuned on
_WIDTH = 98


@dataclass(frozen=True)
class Findings:
    """What a source holds, as far as its names and tables tell: no picture is opened."""

    source: SourceConfig
    classes: dict[str, int]  # class -> images, in order of appearance
    splits: dict[str, int]
    captions: int
    problems: tuple[Problem, ...] = ()  # what was left out, and why

    @property
    def smallest(self) -> str:
        """The class with the fewest images."""
        return min(self.classes, key=lambda name: (self.classes[name], name))


@dataclass(frozen=True)
class ChosenPlan:
    """Shares and margins of a round, and why they were chosen."""

    roles: RolesConfig = field(default_factory=RolesConfig)
    margin: float | dict[str, float] = 0.02
    confidence: float = 0.95
    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict[str, tuple[str, ...]])  # section -> sentences
    target_gain: bool = True  # claimed as well
    chance: str = ""  # that the round passes, as `holdfast plan` says it


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
        tuple(listing.problems),
    )


def counted(findings: Findings, main: Catalogue) -> Findings:
    """The findings without files that cannot be read; ``main`` is the source as `data` and `develop` read it."""
    classes = Counter(name for name in main.column("class") if name is not None)
    for name in findings.classes:
        if not classes[name]:
            raise UserError(
                f"no picture of the class {name!r} can be read",
                found="; ".join(map(str, main.problems[:5])),
                do="replace its files, or move its folder out of the way",
            )
    _check_counts(classes)
    return replace(
        findings,
        classes=dict(classes),
        splits=dict(Counter(split or "" for split in main.column("split"))),
        captions=sum(caption is not None for caption in main.column("caption")),
        problems=main.problems,
    )


def _empty(listing: Listing) -> tuple[str, ...]:
    return tuple(problem.where for problem in listing.problems if problem.kind == NO_PICTURES)


def _check_classes(listing: Listing, classes: Counter[str]) -> None:
    if len(classes) < 2:
        raise UserError(
            f"{listing.name} has {'one class' if classes else 'no classes'}",
            expected="at least two: one to improve and one to protect. class/picture.jpg or split/class/picture.jpg, "
            "or a table with the columns filepath,title,label[,split]",
            found=(", ".join(classes) or f"{len(listing.entries)} pictures without a class")
            + (f"; no pictures in {', '.join(_empty(listing))}" if _empty(listing) else ""),
            do="name the folder whose subfolders are the classes",
        )
    _check_counts(classes)


def _check_counts(classes: Counter[str]) -> None:
    for name, count in classes.items():
        if count < 2:
            raise UserError(
                f"the class {name!r} has one image",
                expected="at least two, one to train on and one to judge by; hundreds for a certificate",
                do="add images, or move its folder out of the way",
            )


def check_target(findings: Findings, target: str | None, make: str | None) -> None:
    """The class to improve must have images; without a model it must be named, for the model is made without it."""
    if target is not None and target not in findings.classes:
        raise UserError(f"the class {target!r} has no images", do=nearest(target, findings.classes))
    if target is None and make is not None:
        raise UserError(
            "which class is to be improved?",
            expected="--target: the old model is tuned on the other classes",
            found=", ".join(findings.classes),
        )


# -- ROUND.toml ----------------------------------------------------------------------------------------------------


def round_text(
    findings: Findings,
    model: ModelConfig,
    *,
    make: str | None = None,
    target: str | None = None,
    relative_to: Path | None = None,
    plan: ChosenPlan | None = None,
) -> str:
    """A commented ROUND.toml. Without a target the smallest class is proposed in a comment and must be confirmed.

    ``make`` is the architecture that TUNE.toml makes the old model of.
    """
    plan = plan or ChosenPlan()
    sections = [
        _task_section(findings, target),
        _data_section(findings, relative_to, plan),
        _model_section(model, make),
        _train_section(len(findings.classes), make or str(model.architecture).partition("-")[0]),
        _certify_section(plan),
    ]
    return "\n".join(sections)


def _task_section(findings: Findings, target: str | None) -> str:
    proposed = target or findings.smallest
    choice = f"target = {_quote(proposed)}"
    if target is None:
        choice = (
            f"# The class to improve. Nobody but you knows which; {_quote(proposed)} has the fewest images.\n# {choice}"
        )
    others = [name for name in findings.classes if name != proposed]
    return f"""# A round: improve one class, keep every other.
#   holdfast plan ROUND.toml       what the sealed images can prove, and how likely the round passes
#   holdfast develop ROUND.toml    train where that is needed, choose, certify
# Settings that are left out have their defaults (docs/reference/configuration.md).
seed = 0

[task]
{choice}
# Protected is every other class ({_counts(findings, others)}).
# protected = [{", ".join(map(_quote, others[:3]))}{", …" if len(others) > 3 else ""}]   # or only these
template = "a photo of a {{}}"   # the sentence for a class; a/an agrees with its name
# names = {{ {_key(others[0])} = "words for it" }}
"""


def _counts(findings: Findings, names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(f"{name} {findings.classes[name]}" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") + " images"


def _data_section(findings: Findings, relative_to: Path | None, plan: ChosenPlan) -> str:
    own = {split_role(name or None) for name in findings.splits}
    roles = plan.roles
    drawn = {Role.DEV: roles.dev, Role.SEALED: roles.sealed, Role.TEST: roles.test}
    shares = "\n".join(_share_line(role, share, role in own) for role, share in drawn.items())
    if roles.base:
        shares = f"{_share_line(Role.BASE, roles.base, False)}\n{shares}"
    splits = "".join(f"# The source brings splits: {_splits(findings)}.\n" for _ in [0] if any(findings.splits))
    named = "".join(
        f"{_key(name)} = {{ {', '.join(f'{role} = {share:g}' for role, share in own_shares)} }}\n"
        for name, own_shares in ((name, _given(roles, name)) for name in roles.by_class)
    )
    table = f"\n[data.roles.by_class]   # shares of single classes\n{named}" if named else ""
    return f"""[data]
{splits}source = {_source(findings.source, relative_to)}
leaks = "drop"   # near copies of held-out images are not trained on
# pairs = [{{ kind = "csv", path = "more.csv" }}]   # more pictures of the target, with captions

[data.roles]   # how images are shared out, by their content; the rest is trained on
{_comment(plan.reasons.get("roles", ()))}{shares}
{table}"""


def _given(roles: RolesConfig, name: str) -> list[tuple[str, float]]:
    return list(roles.by_class[name].model_dump(exclude_none=True).items())


def _splits(findings: Findings) -> str:
    return ", ".join(f"{name or 'none'} {count}" for name, count in findings.splits.items())


def _source(source: SourceConfig, relative_to: Path | None) -> str:
    fields = [f"kind = {_quote(source.kind)}"]
    if source.path is not None:
        path = source.path
        if relative_to is not None:
            path = path.resolve()
            if path.is_relative_to(relative_to.resolve()):
                path = path.relative_to(relative_to.resolve())
        fields.append(f"path = {_quote(str(path))}")
    return f"{{ {', '.join(fields)} }}"


_MEANING = {
    Role.BASE: "make the old model",
    Role.DEV: "choose among candidates",
    Role.SEALED: "opened once, by the certificate",
    Role.TEST: "scored once, after the choice",
}


def _share_line(role: Role, share: float, own: bool) -> str:
    if own:
        return f"# {role.value}: the source brings its own ({_MEANING[role]})"
    return f"{role.value} = {share}".ljust(14) + f"# {_MEANING[role]}"


def _model_section(model: ModelConfig, make: str | None) -> str:
    freeze = f'freeze = "{model.freeze}"   # its text tower stays as it is\n' if model.freeze != "nothing" else ""
    if model.start is None:
        about = "the old model: ImageNet classes placed by their names, without training" if freeze else "the old model"
        weights = "" if model.weights is None else f"weights = {_quote(model.weights)}\n"
        return f"[model]   # {about}\narchitecture = {_quote(str(model.architecture))}\n{weights}{freeze}"
    made = "the old model: made by `holdfast tune TUNE.toml --out base`" if make else "the old model"
    return f"[model]   # {made}\nstart = {_quote(str(model.start))}\n{freeze}"


def _train_section(classes: int, kind: str) -> str:
    size = _ROUND_SIZES.get(kind, _ROUND_OF_A_MODEL)
    tasks = f"tasks_per_step = {size.tasks}   # protected classes a step\n" if classes - 1 > size.tasks else ""
    return f"""[train]   # sized for {size.machine}
only_if_needed = true   # no steps where fits of the last layer are enough; --train: always
steps = {size.steps}
batch = {size.batch}
{tasks}images_per_task = {size.images}   # of each protected class, a step
learning_rate = {size.rate}
{_SPEED if kind in _ROUND_SIZES else ""}
[evaluate]
every = {size.every}   # steps; each evaluation makes a checkpoint to choose from
"""


def _certify_section(plan: ChosenPlan) -> str:
    chance = [f"Chance that the round passes: {plan.chance} (holdfast plan ROUND.toml)."] if plan.chance else []
    why = _comment([*plan.reasons.get("margin", ()), *chance])
    head = f"""[certify]   # the claim: no protected class loses more accuracy than its margin
confidence = {plan.confidence:g}
ledger = "ledger"   # this folder records every query of sealed images: keep it with your data
"""
    if not plan.target_gain:
        head += f"{_comment(plan.reasons.get('gain', ()))}target_gain = false\n"
    if not isinstance(plan.margin, dict):
        return f"{head}{why}margin = {plan.margin:g}\n"
    lines = "\n".join(f"{_key(name)} = {margin:g}" for name, margin in plan.margin.items())
    return f"{head}\n[certify.margin]\n{why}{lines}\n"


# -- TUNE.toml -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """How much is trained."""

    steps: int
    batch: int
    images: int  # of each class a step
    tasks: int  # protected classes a step
    rate: str
    every: int
    machine: str = "two CPU cores: minutes; a GPU is used where there is one"


# Enough for folders of 30 to 1000 images a class at 64 to 128 pixels.
_TUNE_SIZES = {"tiny": _Sizes(400, 64, 8, 24, "1e-3", 200), "parts": _Sizes(20, 64, 6, 16, "3e-4", 20)}
_ROUND_SIZES = {
    "tiny": _Sizes(120, 48, 6, 24, "3e-4", 40),
    "parts": _Sizes(30, 24, 3, 16, "1e-4", 10),
    "conse": _Sizes(10, 16, 2, 16, "1e-5", 5),
}
_ROUND_OF_A_MODEL = _Sizes(400, 128, 10, 64, "1e-5", 100, "a GPU; for two CPU cores take a tenth of steps and batch")
_SPEED = 'speed = "plain"   # on a GPU compiling would take longer than these few steps\n'
_ARCHITECTURES = {"tiny": "tiny", "parts": "parts-128"}
_ABOUT = {
    "tiny": "a small two-tower model, trained from scratch on your images",
    "parts": "a pretrained EfficientNet at 128 pixels and a pretrained sentence encoder, brought together",
}


def old_model(make: str) -> ModelConfig:
    """[model] of the round whose old model TUNE.toml makes."""
    return ModelConfig(start=BASE / "model", freeze="text" if make == "parts" else "nothing")


def tune_text(
    findings: Findings, make: str, target: str, *, relative_to: Path | None = None, plan: ChosenPlan | None = None
) -> str:
    """The TUNE.toml of a round's old model; its [data] is that of the round, word for word."""
    size, classes = _TUNE_SIZES[make], len(findings.classes)
    tasks = f"tasks_per_step = {size.tasks}\n" if classes - 1 > size.tasks else ""
    freeze = 'freeze = "text"\n' if make == "parts" else ""
    return f"""# The old model of ROUND.toml, for want of one of your own:
#   holdfast tune TUNE.toml --out {BASE}
# It is tuned on the images that are left to train on. No dev, test or sealed image of ROUND.toml is among them, because
# [data] is the same in both files: change it in both.
seed = 0
objective = "cross_entropy"
# It learns the target's name from {FEW} images. The others are the new data that the round brings.
at_most = {{ {_key(target)} = {FEW} }}
template = "a photo of a {{}}"

{_data_section(findings, relative_to, plan or ChosenPlan())}
[model]   # {_ABOUT[make]}
architecture = {_quote(_ARCHITECTURES[make])}
{freeze}
[train]   # sized for {size.machine}
steps = {size.steps}
{tasks}images_per_task = {size.images}   # of each class, a step
learning_rate = {size.rate}
{_SPEED}
[evaluate]
every = {size.every}
"""


# -- writing TOML --------------------------------------------------------------------------------------------------


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML basic string


def _key(name: str) -> str:
    """A bare key where TOML allows it."""
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _quote(name)


def _comment(sentences: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for sentence in sentences for line in textwrap.wrap(sentence, _WIDTH))
