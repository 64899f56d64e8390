from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from pictures import encode, picture, write_folder

from holdfast.config import DataConfig, RolesConfig, SourceConfig, TaskConfig
from holdfast.data.assemble import NEUTRAL_PROMPT, Assembled, assemble, labelled
from holdfast.data.catalogue import count_problems
from holdfast.data.images import evaluation_view
from holdfast.data.init_round import inspect, round_text
from holdfast.data.task import Role
from holdfast.errors import UserError

ROLES = {"base": 0.1, "dev": 0.2, "sealed": 0.2, "test": 0.2}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("scenes"), {"cat": 40, "dog": 40, "owl": 30})


def run(root: Path, *, target: str = "owl", seed: int = 0, task: object = None, **data: object) -> Assembled:
    config = DataConfig.model_validate({"source": {"path": "."}, "roles": ROLES, **data})
    description = TaskConfig.model_validate({"target": target, **(task or {})})  # type: ignore[dict-item]
    return assemble(config, description, size=24, interpolation="bicubic", seed=seed, root=root)


def test_sets_are_disjoint_and_complete(scenes: Path) -> None:
    made = run(scenes)
    data = made.data
    assert data.tasks.classes == ("cat", "dog", "owl")
    assert data.tasks.prompts[2] == ("a photo of an owl",)
    sets = [data.target.ids, data.constraint.ids, data.dev.ids, data.open_test().ids, data.open_sealed().ids]
    everything = [identity for ids in sets for identity in ids]
    assert len(everything) == len(set(everything))
    assert sorted(data.open_sealed().ids) == list(data.sealed_ids)
    base = sum(role == "base" for role in made.roles["role"].to_pylist())
    assert len(everything) + base == 110 == len(made.roles)
    assert set(data.constraint.labels) == {0, 1}
    assert set(data.dev.labels) == {0, 1, 2}
    assert data.negatives.ids == data.constraint.ids
    assert set(data.negatives.texts) == {"a photo of a cat", "a photo of a dog"}
    assert not made.problems


def test_pixels_belong_to_their_ids_and_labels(scenes: Path) -> None:
    made = run(scenes)
    where = {row["example_id"]: row for row in made.roles.to_pylist()}
    from PIL import Image

    for examples in (made.data.constraint, made.data.dev, made.data.open_test()):
        for position in range(0, len(examples), 7):
            row = where[examples.ids[position]]
            with Image.open(scenes / row["locator"]) as image:
                expected = evaluation_view(image.convert("RGB"), 24)
            assert np.array_equal(examples.images(np.array([position]))[0].numpy(), expected)
            assert made.data.tasks.classes[examples.labels[position]] == row["class"]


def test_sealed_and_test_are_decoded_only_when_opened(scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes, tmp_path / "s")
    made = run(tmp_path / "s")
    for row in made.roles.to_pylist():
        if row["role"] == "sealed":
            (tmp_path / "s" / row["locator"]).unlink()
    made.data.open_test()
    with pytest.raises(UserError, match="cannot be read"):
        made.data.open_sealed()


def test_a_sealed_file_that_was_never_readable_is_named_before_it_is_opened(scenes: Path, tmp_path: Path) -> None:
    root = tmp_path / "s"
    shutil.copytree(scenes, root)
    victims = sorted((root / "cat").iterdir())[:10]  # their new bytes draw new roles: some are sealed
    for number, victim in enumerate(victims):
        victim.write_bytes(victim.read_bytes()[: 200 + number])
    made = run(root, bad_image_limit=0.5)
    with pytest.raises(UserError, match=r"of \d+ sealed pictures cannot be read") as raised:
        made.check_sealed()
    assert any(victim.name in raised.value.found for victim in victims)
    assert "take them out, and begin again" in raised.value.do
    assert "no query was spent" in raised.value.do


def test_seed_draws_constraint_images_and_nothing_else(scenes: Path) -> None:
    first, again, other = (run(scenes, seed=seed, constraint_images=6, target_images=4) for seed in (0, 0, 1))
    assert first.data.constraint.ids == again.data.constraint.ids
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert set(first.data.constraint.ids) != set(other.data.constraint.ids)
    assert first.roles.equals(other.roles)
    assert list(np.bincount(first.data.constraint.labels)) == [6, 6]
    assert len(first.data.target) == 4


def test_outside_pairs_and_negatives(scenes: Path, tmp_path: Path) -> None:
    root = tmp_path / "r"
    shutil.copytree(scenes, root / "main")
    sealed = next(row for row in run(root / "main").roles.to_pylist() if row["role"] == "sealed")
    (root / "more").mkdir()
    for number in range(3):
        (root / "more" / f"{number}.jpg").write_bytes(encode(picture(1000 + number)))
    shutil.copy(root / "main" / sealed["locator"], root / "more" / "leak.jpg")
    lines = ["0.jpg,an owl", "0.jpg,an owl at night", "0.jpg,an owl", "1.jpg,", "leak.jpg,a leak"]
    (root / "more" / "pairs.csv").write_text("filepath,title\n" + "\n".join(lines) + "\n")
    write_folder(root / "plain", {".": 5}, start=2000)
    write_folder(root / "other", {"owl": 2, "red_fox": 3}, start=3000)
    made = run(
        root,
        source={"path": "main"},
        pairs=[{"kind": "csv", "path": "more/pairs.csv"}],
        negatives=[{"path": "plain"}, {"path": "other"}],
        target_images=2,
    )
    assert made.data.target.texts[2:] == ("an owl", "an owl at night", "a photo of an owl")
    assert made.data.target.ids[2] == made.data.target.ids[3]
    assert made.data.negatives.texts == (NEUTRAL_PROMPT,) * 5 + ("a photo of a red fox",) * 3
    kinds = count_problems(made.problems)
    assert kinds == {"leak": 1, "duplicate": 1, "target among negatives": 2}


def test_captions_of_the_target_are_used(tmp_path: Path) -> None:
    rows = []
    for number in range(40):
        (tmp_path / f"{number}.jpg").write_bytes(encode(picture(number)))
        label = "owl" if number % 2 else "cat"
        rows.append(f"{number}.jpg,caption {number},{label}")
        if label == "owl":
            rows.append(f"{number}.jpg,second caption {number},{label}")
    (tmp_path / "t.csv").write_text("filepath,title,label\n" + "\n".join(rows))
    made = run(tmp_path, source={"kind": "csv", "path": "t.csv"})
    assert not made.problems
    texts = made.data.target.texts
    assert len(texts) == 2 * len(set(made.data.target.ids))
    assert texts[0].startswith("caption")
    assert texts[1] == f"second {texts[0]}"


def test_corrupt_images_are_skipped_up_to_the_limit(scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes, tmp_path / "s")
    constraint = [row for row in run(tmp_path / "s").roles.to_pylist() if row["role"] == "train"]
    for row in constraint[:6]:  # other content, so other roles: some of the six are trained on
        file = tmp_path / "s" / row["locator"]
        file.write_bytes(file.read_bytes()[:400] + row["example_id"].encode())
    with pytest.raises(UserError, match=r"cannot be read[\s\S]*bad_image_limit"):
        run(tmp_path / "s", bad_image_limit=0.0)
    made = run(tmp_path / "s", bad_image_limit=0.3)
    assert count_problems(made.problems).get("unreadable", 0) >= 1
    bad = {problem.where for problem in made.problems}
    used = set(made.data.constraint.ids) | set(made.data.target.ids) | set(made.data.dev.ids)
    assert not used & {row["example_id"] for row in made.roles.to_pylist() if row["locator"] in bad}


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"target": "owls"}, "did you mean 'owl'"),
        ({"target": "owl", "protected": ("cat", "dgo")}, "did you mean 'dog'"),
        ({"target": "owl", "ignored": ("mouse",)}, "known names"),
        ({"target": "owl", "names": {"doog": "dog"}}, "did you mean 'dog'"),
        ({"target": "owl", "ignored": ("cat", "dog")}, "nothing to protect"),
        ({"target": "owl", "names": {"cat": "dog"}}, "same words"),
    ],
)
def test_bad_tasks(scenes: Path, task: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(scenes, task=task)


def test_classes_too_small(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 30, "dog": 1, "owl": 30})
    with pytest.raises(UserError, match="'dog' has one image"):
        run(tmp_path)
    assert run(tmp_path, task={"ignored": ("dog",)}).data.tasks.protected == ("cat",)
    write_folder(tmp_path, {"dog": 2}, start=500)
    with pytest.raises(UserError, match="'dog' has no image for the role"):
        run(tmp_path)
    write_folder(tmp_path / "flat", {".": 4})
    with pytest.raises(UserError, match="no classes"):
        run(tmp_path / "flat")


def test_no_sealed_images_unless_they_have_a_share(scenes: Path) -> None:
    made = run(scenes, roles={"sealed": 0.0})
    assert made.data.sealed_ids == ()
    with pytest.raises(UserError, match="sealed"):
        made.data.open_sealed()


def test_prompts_from_a_file(scenes: Path, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"cat": ["the cat", "a tom"], "owl": "an owl"}))
    made = run(scenes, prompts=tmp_path / "p.json")
    assert made.data.tasks.prompts == (("the cat", "a tom"), ("a photo of a dog",), ("an owl",))
    assert set(made.data.negatives.texts) == {"the cat", "a tom", "a photo of a dog"}
    (tmp_path / "q.toml").write_text('ctt = "the cat"\n')
    with pytest.raises(UserError, match="did you mean 'cat'"):
        run(scenes, prompts=tmp_path / "q.toml")
    (tmp_path / "r.toml").write_text("cat = []\n")
    with pytest.raises(UserError, match="no sentences"):
        run(scenes, prompts=tmp_path / "r.toml")


def test_labelled(scenes: Path) -> None:
    source = [SourceConfig(path=scenes)]
    common = {"size": 16, "interpolation": "bilinear", "root": Path()}
    problems: list[object] = []
    found = labelled(source, ("owl", "cat"), problems=problems, **common)  # type: ignore[arg-type]
    assert list(np.bincount(found.labels)) == [30, 40]
    assert [str(problem) for problem in problems] == ["class left out: dog"]
    base = labelled(source, ("cat", "dog"), roles=[Role.BASE], roles_config=RolesConfig(base=5), **common)
    assert list(np.bincount(base.labels)) == [5, 5]
    with pytest.raises(UserError, match="did you mean 'owl'"):
        labelled(source, ("owls",), **common)
    assert len(labelled(source, ("owls", "cat"), missing_ok=True, **common)) == 40


def test_first_round_file_of_a_folder(scenes: Path, tmp_path: Path) -> None:
    import tomllib

    from holdfast.config import ModelConfig, RoundConfig

    model = ModelConfig(architecture="tiny")
    found = inspect(str(scenes))
    assert (found.classes, found.smallest) == ({"cat": 40, "dog": 40, "owl": 30}, "owl")
    proposed = round_text(found, model, relative_to=scenes.parent)
    assert '# target = "owl"' in proposed
    assert "target" not in tomllib.loads(proposed)["task"]
    values = tomllib.loads(round_text(found, model, target="dog", relative_to=scenes.parent))
    config = RoundConfig.model_validate(values)
    assert config.task.target == "dog"
    assemble(config.data, config.task, size=8, interpolation="bicubic", seed=0, root=scenes.parent)
    write_folder(tmp_path, {"only": 3})
    with pytest.raises(UserError, match="one class"):
        inspect(str(tmp_path))
