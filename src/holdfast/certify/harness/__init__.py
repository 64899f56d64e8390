"""Logs of other tools as tables of predictions: lm-eval, inspect_ai, NeMo Evaluator, COCO detections.

Every reader yields samples: a task, an id, a score, and where rows belong together their group. :func:`read_logs` joins
those of the old and the new model. A difference in what was asked is refused or, where only the prompt differs, told.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.certify.harness.coco import read_coco
from holdfast.certify.harness.inspect_logs import read_inspect
from holdfast.certify.harness.joined import Joined, join
from holdfast.certify.harness.lm_eval import read_lm_eval
from holdfast.certify.harness.nemo import read_nemo
from holdfast.certify.harness.samples import Asked, Log
from holdfast.errors import UserError, nearest

READERS = {"lm-eval": read_lm_eval, "inspect": read_inspect, "nemo": read_nemo}
FORMATS = (*READERS, "coco")


def read_logs(
    kind: str,
    old: Path | str,
    new: Path | str,
    *,
    metrics: Mapping[str, str] | None = None,
    task_field: str | None = None,
    group_field: str | None = None,
    ground_truth: Path | str | None = None,
    min_score: float = 0.25,
    score_range: tuple[float, float] | None = None,
    tasks_may_differ: bool = False,
) -> Joined:
    """Logs of two models as one table, for :func:`holdfast.certify` (``read_logs(...).table``).

    ``kind`` is ``lm-eval``, ``inspect``, ``nemo`` or ``coco``; ``old`` and ``new`` are log files or folders of them.
    ``metrics`` names the metric of a task, ``metrics[""]`` that of all others. ``task_field`` and ``group_field`` are
    fields of a document: a task for each of its values, and what documents were drawn with. For ``coco``,
    ``ground_truth`` is the file of annotations, and detections below ``min_score`` do not count. With
    ``tasks_may_differ`` a task that only one model was evaluated on is listed in ``missing``, not refused.
    """
    if kind not in FORMATS:
        raise UserError(f"there are no logs of {kind!r}", expected=", ".join(FORMATS), do=nearest(kind, FORMATS))
    asked = Asked(dict(metrics or {}), task_field, group_field)
    paths = (Path(old), Path(new))
    logs: list[Log] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist", expected=f"logs of {kind}", do="check the path")
        if kind != "coco":
            logs.append(READERS[kind](path, asked))
        elif ground_truth is None:
            raise UserError("detections without their ground truth", do="name the file of annotations")
        else:
            logs.append(read_coco(Path(ground_truth), path, asked, min_score=min_score))
    return join(kind, logs[0], logs[1], paths, score_range=score_range, tasks_may_differ=tasks_may_differ)
