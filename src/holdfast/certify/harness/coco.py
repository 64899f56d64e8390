"""Detections in the format of COCO results, which ``ultralytics val save_json=True`` writes too (``predictions.json``).

Annotations: ``images`` (``id``, ``file_name``), ``categories`` (``id``, ``name``), ``annotations`` (``image_id,
category_id, bbox``; ``iscrowd``). Detections: a list of ``image_id, category_id, bbox, score``, boxes ``[x, y, width,
height]``. An ``image_id`` that is no id of the annotations may be the stem of a file name, as ultralytics writes it.

Metric ``box``: every annotated box is a sample, found or not; the task is its category, the group its image. It does
not see false alarms. Metric ``image``: every image is a sample, scored by F1 over all its boxes and detections.
A detection is matched to a box of its category at an IoU of 0.5 or more, the most certain detection first.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.certify.exact.region import FloatArray
from holdfast.certify.harness.samples import Asked, Log, Sample, chosen_metric, read_json_file
from holdfast.errors import UserError

ANNOTATIONS = "annotations of COCO: an object with images, categories and annotations"
DETECTIONS = "detections of COCO: a list of image_id, category_id, bbox and score"
METRICS = ("box", "image")
ENOUGH = 0.5  # IoU of a match
MOST = 100  # detections of an image, as COCO counts them


@dataclass(frozen=True)
class Box:
    """A rectangle of a category, annotated or detected."""

    category: int
    corners: tuple[float, float, float, float]  # left, top, right, bottom
    name: str = ""  # of an annotated one
    crowd: bool = False  # stands for many: neither to be found nor a false alarm
    score: float = 1.0


@dataclass(frozen=True)
class Annotated:
    """Images with their boxes."""

    images: dict[int, str]  # file names
    categories: dict[int, str]
    boxes: dict[int, list[Box]]  # by image

    def image(self, value: Any, stems: dict[str, int]) -> int | None:
        """The id of an image that a detection names."""
        return value if isinstance(value, int) and value in self.images else stems.get(str(value))


def read_coco(truth: Path, path: Path, asked: Asked, *, min_score: float = 0.25) -> Log:
    """Which boxes (or images) one model got right."""
    if asked.task_field is not None or asked.group_field is not None:
        raise UserError("detections have no fields for tasks or groups", expected="tasks are categories, groups images")
    annotated = read_annotations(truth)
    detections = _read_detections(path, annotated, min_score)
    metric = chosen_metric(asked.metric(""), METRICS, METRICS, "the detections", path)
    log = Log(group="image")
    for image in annotated.images:
        boxes, found = annotated.boxes.get(image, []), detections.get(image, [])
        hits = matched(boxes, found)
        if metric == "image":
            log.add(Sample("images", str(image), _f1(boxes, found, hits)))
            continue
        for place, box in enumerate(boxes):
            if not box.crowd:
                task = annotated.categories[box.category]
                log.add(Sample(task, f"{image}/{box.name}", float(place in hits.values()), group=str(image)))
    log.metrics = dict.fromkeys(log.tasks(), f"{metric}, IoU {ENOUGH:g}, score from {min_score:g}")
    return log


def read_annotations(path: Path) -> Annotated:
    """The ground truth."""
    value = read_json_file(path, ANNOTATIONS)
    try:
        images = {int(item["id"]): str(item.get("file_name", "")) for item in value["images"]}
        categories = {int(item["id"]): str(item["name"]) for item in value["categories"]}
        boxes: dict[int, list[Box]] = defaultdict(list)
        for place, item in enumerate(value["annotations"]):
            category = int(item["category_id"])
            if int(item["image_id"]) not in images or category not in categories:
                raise ValueError(f"annotation {item.get('id', place)} names an image or a category that is not there")
            name, crowd = str(item.get("id", place)), bool(item.get("iscrowd", 0))
            boxes[int(item["image_id"])].append(Box(category, _corners(item["bbox"]), name, crowd))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise UserError(f"{path} holds no annotations", expected=ANNOTATIONS, found=found) from error
    if not images:
        raise UserError(f"{path} holds no images", expected=ANNOTATIONS)
    return Annotated(images, categories, dict(boxes))


def _read_detections(path: Path, annotated: Annotated, min_score: float) -> dict[int, list[Box]]:
    value = read_json_file(path, DETECTIONS)
    stems = {Path(name).stem: image for image, name in annotated.images.items() if name}
    found: dict[int, list[Box]] = defaultdict(list)
    unknown: list[Any] = []
    try:
        if not isinstance(value, list):
            raise TypeError("no list")
        for item in value:
            image, score = annotated.image(item["image_id"], stems), float(item["score"])
            if image is None or int(item["category_id"]) not in annotated.categories:
                unknown.append((item["image_id"], item["category_id"]))
            elif score >= min_score:
                found[image].append(Box(int(item["category_id"]), _corners(item["bbox"]), score=score))
    except (KeyError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"[:200]
        raise UserError(f"{path} holds no detections", expected=DETECTIONS, found=text) from error
    if unknown:
        raise UserError(
            f"{len(unknown)} detections of {path} are about images or categories without annotations",
            expected="image_id and category_id of the ground truth",
            found=f"image {unknown[0][0]!r}, category {unknown[0][1]!r}",
            do="give the annotations that the models were validated on; ultralytics numbers own categories from 1",
        )
    return {image: sorted(boxes, key=lambda box: -box.score)[:MOST] for image, boxes in found.items()}


def _corners(box: Any) -> tuple[float, float, float, float]:
    left, top, width, height = (float(part) for part in box)
    if not (np.isfinite([left, top, width, height]).all() and width >= 0 and height >= 0):
        raise ValueError(f"the box {box} is no box")
    return left, top, left + width, top + height


def matched(boxes: list[Box], detections: list[Box]) -> dict[int, int]:
    """For a detection the box that it finds; each box is found once, a crowd as often as need be."""
    hits: dict[int, int] = {}
    if not boxes:
        return hits
    corners = np.array([box.corners for box in boxes])
    for place, detection in enumerate(detections):
        overlaps = _overlap(np.array(detection.corners), corners)
        taken = set(hits.values())
        free = [
            index
            for index, box in enumerate(boxes)
            if box.category == detection.category and overlaps[index] >= ENOUGH and (box.crowd or index not in taken)
        ]
        if free:
            hits[place] = max(free, key=lambda index: (not boxes[index].crowd, overlaps[index]))
    return hits


def _overlap(box: FloatArray, others: FloatArray) -> FloatArray:
    """Intersection over union of a box with others, [n, 4]."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    common = np.clip(sides, 0.0, None).prod(axis=1)
    areas = (others[:, 2:] - others[:, :2]).prod(axis=1) + (box[2:] - box[:2]).prod()
    return common / np.maximum(areas - common, 1e-12)


def _f1(boxes: list[Box], detections: list[Box], hits: dict[int, int]) -> float:
    """2 TP / (2 TP + FP + FN) of an image; one without boxes and without detections is right."""
    wanted = sum(not box.crowd for box in boxes)
    right = sum(not boxes[index].crowd for index in hits.values())
    ignored = len(hits) - right  # detections of a crowd
    total = wanted + len(detections) - ignored
    return 1.0 if total == 0 else 2.0 * right / total
