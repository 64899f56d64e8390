"""The keys of a ROUND.toml, for whoever checks them without importing the sections; a test compares them with those."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.config.base import shown
from holdfast.errors import UserError, nearest

SECTIONS = ("seed", "task", "data", "model", "method", "train", "evaluate", "candidates", "certify")
# Of the sections that a plan does not read. [method] is not among them: only the method's own module knows its keys.
KEYS: dict[str, tuple[str, ...]] = {
    "model": ("start", "text", "architecture", "weights", "head_rank", "class_temperature", "freeze"),
    "train": (
        "steps",
        "only_if_needed",
        "batch",
        "target_share",
        "tasks_per_step",
        "images_per_task",
        "optimizer",
        "learning_rate",
        "head_learning_rate",
        "ema_weight",
        "weight_decay",
        "schedule",
        "warmup_steps",
        "clip_norm",
        "precision",
        "device",
        "speed",
        "checkpoint_activations",
        "shard",
        "augment",
        "constraint_views",
        "crop_scale",
        "flip",
        "rotation",
        "log_every",
        "checkpoint_every",
        "keep_checkpoints",
    ),
    "evaluate": ("every", "batch", "keep_candidates"),
}


def check_kind(values: Mapping[str, object], where: str, *, tuning: bool = False) -> None:
    """Refuse the settings of ``tune`` where a round is wanted, and a round where those are."""
    if tuning and "task" in values:
        raise UserError(f"{where} is a round", expected="a TUNE.toml", do=f"run it with `holdfast develop {where}`")
    if not tuning and "task" not in values and "objective" in values:
        raise UserError(
            f"{where} holds the settings of `holdfast tune`",
            expected="a ROUND.toml",
            do=f"make the old model with `holdfast tune {where}`, or name the round's file",
        )


def check_keys(values: Mapping[str, object], where: str) -> None:
    """Refuse an unknown section, one that is no table, or an unknown key of a section in ``KEYS``.

    In the words of a strict parse.
    """
    check_kind(values, where)
    _check(values, SECTIONS, "", where)
    for section in SECTIONS:
        if section != "seed" and section in values and not isinstance(values[section], Mapping):
            kind = f"{section.capitalize()}Config"
            message = f"{where}: {section}: Input should be a valid dictionary or instance of {kind}"
            raise UserError(message, found=shown(values[section]))
    for section, known in KEYS.items():
        found = values.get(section)
        if isinstance(found, Mapping):
            _check(found, known, f"{section}.", where)  # pyright: ignore[reportUnknownArgumentType]


def _check(found: Mapping[str, object], known: tuple[str, ...], above: str, where: str) -> None:
    for name in found:
        if name not in known:
            raise UserError(f"{where}: unknown key {f'{above}{name}'!r}", do=nearest(name, known))
