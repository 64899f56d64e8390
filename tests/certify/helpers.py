"""Tables of predictions with known counts."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from holdfast.artifacts import PREDICTIONS

CLASSES = ["clear", "overcast", "snowy", "rainy", "foggy"]
Spec = Mapping[str, tuple[int, int, int]]  # task -> n, gained, lost


def rows(spec: Spec) -> list[dict[str, str]]:
    """One row an image; a few are wrong under both models."""
    made = []
    for task, (n, gained, lost) in spec.items():
        other = CLASSES[(CLASSES.index(task) + 1) % len(CLASSES)] if task in CLASSES else "something else"
        for k in range(n):
            old = other if k < gained else task
            new = other if gained <= k < gained + lost else task
            if k == n - 1 and n > gained + lost + 1:
                old = new = other
            made.append({"example_id": f"{task}-{k}", "task": task, "label": task, "old": old, "new": new})
    return made


def write_csv(path: Path, table: list[dict[str, str]], columns: str = "task,label,old,new") -> Path:
    names = columns.split(",")
    lines = [",".join(row[name] for name in names) for row in table]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


def predictions(table: list[dict[str, str]], model: str) -> pa.Table:
    """The rows of one model as a table of predictions."""
    return pa.Table.from_pylist(
        [
            {
                "example_id": row["example_id"],
                "task": row["task"],
                "label": row["label"],
                "prediction": row[model],
                "loss": 0.0,
                "score": 1.0,
            }
            for row in table
        ],
        schema=PREDICTIONS,
    )


def write_pair(folder: Path, spec: Spec, name: str = "") -> tuple[Path, Path]:
    """Two files of predictions, one a model."""
    columns = "example_id,task,label,prediction"
    old, new = (
        write_csv(folder / f"{name}{model}.csv", [{**row, "prediction": row[model]} for row in rows(spec)], columns)
        for model in ("old", "new")
    )
    return old, new
