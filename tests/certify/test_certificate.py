"""The certificate and its verification; queries of sealed sets."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.artifacts import RunFolder
from holdfast.certify.certificate import read_evidence, run_test, verify_certificate, write_certificate
from holdfast.certify.ledger import Ledger
from holdfast.certify.report import report
from holdfast.certify.sealed import Candidates, certify_candidates, write_run_certificate
from holdfast.certify.sealed_claim import SealedClaim, check_possible, read_sealed_claim, sealed_claim
from holdfast.certify.settings import Settings
from holdfast.errors import FaultError, UndecidedError, UserError
from holdfast.files import fingerprint_json, write_json
from tests.certify.helpers import Spec, predictions, rows, write_csv
from tests.malformed import malformed, refusals

GOOD = {"clear": (500, 5, 3), "snowy": (400, 4, 1)}
BAD = {"clear": (500, 5, 30), "snowy": (400, 4, 1)}


def certificate(folder: Path, settings: Settings | None = None) -> Path:
    files = {"predictions": write_csv(folder / "p.csv", rows(GOOD)), "new model": folder / "weights"}
    files["new model"].mkdir()
    (files["new model"] / "model.safetensors").write_bytes(b"weights")
    settings = settings or Settings({"clear": 0.02, "snowy": 0.02})
    paired = read_evidence(files, [])
    assert paired is not None
    reported = report(run_test(paired, settings), confidence=0.95)
    write_certificate(folder / "certificate.json", settings, reported, files)
    return folder / "certificate.json"


def test_a_certificate_holds_anywhere_its_files_are(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    certificate(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert verify_certificate(tmp_path / "there" / "certificate.json")["report"]["verdict"] == "certified"


def test_changed_predictions_weights_or_certificate(tmp_path: Path) -> None:
    path = certificate(tmp_path)
    weights = tmp_path / "weights" / "model.safetensors"
    weights.write_bytes(b"other")
    with pytest.raises(FaultError, match="new model changed"):
        verify_certificate(path)
    weights.write_bytes(b"weights")
    table = (tmp_path / "p.csv").read_text()
    (tmp_path / "p.csv").write_text(table + "clear,clear,clear,clear\n")
    with pytest.raises(FaultError, match="predictions changed"):
        verify_certificate(path)
    (tmp_path / "p.csv").unlink()
    with pytest.raises(UserError, match="does not exist"):
        verify_certificate(path)
    (tmp_path / "p.csv").write_text(table)
    verify_certificate(path)
    text = path.read_text()
    path.write_text(text.replace('"gained": 5', '"gained": 6'))
    with pytest.raises(FaultError, match="was changed"):
        verify_certificate(path)
    path.write_text("{}")
    with pytest.raises(UserError, match="not a certificate"):
        verify_certificate(path)


def test_a_verdict_that_does_not_come_out_again(tmp_path: Path) -> None:
    # Whoever writes a false report with a fingerprint that fits is found out by the recomputation.
    files = {"predictions": write_csv(tmp_path / "p.csv", rows(BAD))}
    settings = Settings({"clear": 0.02, "snowy": 0.02})
    paired = read_evidence(files, [])
    assert paired is not None
    reported = report(run_test(paired, settings), confidence=0.95)
    write_certificate(tmp_path / "c.json", settings, {**reported, "verdict": "certified"}, files)
    with pytest.raises(FaultError, match="does not come out again: verdict"):
        verify_certificate(tmp_path / "c.json")


# -- sealed sets ------------------------------------------------------------------------------------------------------


def plan(spec: Spec, queries: int = 1, **more: object) -> SealedClaim:
    examples = [(row["example_id"], row["task"]) for row in rows(spec)]
    arguments = {"target": "foggy", "margin": 0.02, "target_gain": False, "queries": queries, **more}
    return sealed_claim(examples, **arguments)  # type: ignore[arg-type]


def query(ledger: Ledger, spec: Spec, sealed: SealedClaim, candidates: dict[str, Spec] | None = None):
    table = rows(spec)
    asked: list[str] = []

    def predict(name: str) -> pa.Table:
        asked.append(name)
        return predictions(rows((candidates or {"new": spec})[name]), "new")

    models = {name: f"sha256:{name}" for name in candidates or {"new": spec}}
    outcome = certify_candidates(sealed, ledger, Candidates(models), lambda: predictions(table, "old"), predict)
    return outcome, asked


def test_not_passed_tells_one_bit(tmp_path: Path) -> None:
    ledger, sealed = Ledger(tmp_path), plan(BAD, queries=3)
    outcome, _ = query(ledger, BAD, sealed)
    assert not outcome.passed
    assert outcome.old is None
    assert outcome.reported["verdict"] == "undecided"  # not `regressed`: that would be more than the bit
    assert outcome.reported["sealed"]["queries_left"] == 2
    text = json.dumps(outcome.reported)
    for name in ("p_value", "gained", "lost", "difference", "lower_bound", "needed", "devsafety"):
        assert f'"{name}"' not in text
    assert outcome.reported["level"] == pytest.approx(0.05 / 3)


def test_spent_set_is_shown_in_full_and_certifies_nothing_more(tmp_path: Path) -> None:
    ledger, sealed = Ledger(tmp_path), plan(BAD, queries=1)
    outcome, _ = query(ledger, BAD, sealed)
    assert outcome.standing.retired
    assert outcome.reported["verdict"] == "undecided"
    assert outcome.reported["tasks"][0]["lost"] == 30
    with pytest.raises(UndecidedError, match="spent"):
        query(ledger, GOOD, plan(GOOD, queries=1))


def test_sequence_of_candidates(tmp_path: Path) -> None:
    candidates = {"0.25": GOOD, "0.5": {"clear": (500, 5, 5), "snowy": (400, 4, 1)}, "0.75": BAD, "1": GOOD}
    # All candidates flip the same images of one old model: gained 5 and 4.
    outcome, asked = query(Ledger(tmp_path), GOOD, plan(GOOD), candidates)
    assert asked == ["0.25", "0.5", "0.75"]
    assert (outcome.passed, outcome.shipped) == (True, "0.5")
    assert outcome.reported["sealed"]["shown"] == "0.5"
    assert outcome.reported["verdict"] == "certified"
    assert outcome.reported["tasks"][0]["lost"] == 5


def test_no_candidates_spend_no_look(tmp_path: Path) -> None:
    ledger, sealed = Ledger(tmp_path), plan(GOOD)
    with pytest.raises(UndecidedError, match="no candidate"):
        certify_candidates(
            sealed, ledger, Candidates({}), lambda: pytest.fail("predicted"), lambda _: pytest.fail("predicted")
        )
    assert ledger.standing(sealed.fingerprint) is None


def test_too_few_images_are_said_before_a_look_is_spent(tmp_path: Path) -> None:
    ledger, sealed = Ledger(tmp_path), plan({"clear": (500, 5, 3), "snowy": (4, 4, 0)})
    with pytest.raises(UndecidedError, match="no outcome could certify snowy") as error:
        query(ledger, {"clear": (500, 5, 3), "snowy": (4, 4, 0)}, sealed)
    assert "at least 5 images" in error.value.text()
    assert ledger.standing(sealed.fingerprint) is None
    check_possible(plan(GOOD))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"margin": 1.0}, "margin 1"),
        ({"margin": {"clear": 0.02}}, "no margin is given for snowy"),
        ({"margin": {"claer": 0.02}}, "claer"),
        ({"confidence": 1.0}, "confidence"),
        ({"target_gain": True}, "target 'foggy' has no sealed image"),
    ],
)
def test_bad_plans(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as error:
        plan(GOOD, **wrong)
    assert message in error.value.text()
    with pytest.raises(UserError, match="no sealed images"):
        plan({})


def test_wrong_predictions_are_found_out(tmp_path: Path) -> None:
    from holdfast.errors import HoldfastError

    ledger, sealed = Ledger(tmp_path), plan(GOOD, queries=2)
    with pytest.raises(HoldfastError, match="not those of the sealed images"):
        query(ledger, {"clear": (499, 5, 3), "snowy": (400, 4, 1)}, sealed)
    assert ledger.standing(sealed.fingerprint).queries == 1  # type: ignore[union-attr]


def result_of(spec: Spec, **changes: object) -> dict[str, object]:
    """What `result.json` holds of a run with one candidate, chosen on dev images."""
    share = {"old_accuracy": 0.5, "new_accuracy": 0.5, "old_loss": 1.0, "new_loss": 1.0}
    tasks = {name: {"examples": 9, "gained": 0, "lost": 0, **share} for name in spec}
    dev = {"dev_safety": 0.0, "dev_safety_loss": 0.0, "target_gain": 0.0, "worst_task": "clear", "tasks": tasks}
    candidate = {"name": "refit", "step": "step-00000000", "lambda": 0.0, "bias": 0.0, "dev": dev}
    chosen = {"kept_old": False, "chosen": "refit", "verdict": None, "reason": "it lost nothing on dev images"}
    rest = {"order": [], "certificate": None, "target": "foggy", "protected": sorted(set(spec) - {"foggy"})}
    return {**chosen, **rest, "candidates": [candidate], "dev": dev, "test": None, "blocked_by": None, **changes}


def run_folder(root: Path, spec: Spec, queries: int = 1, margin: object = 0.02) -> RunFolder:
    """A run as `develop` leaves it, as far as certify needs it."""
    run = RunFolder.create(root)
    state = {"status": "done", "root": "..", "parent": "sha256:old", "data": "sha256:data", "fingerprint": "sha256:run"}
    write_json(run.state, state)
    write_json(run.result, result_of(spec))
    certify = {"margin": margin, "confidence": 0.95, "query_budget": queries, "target_gain": True}
    rest = {"data": {"source": {"kind": "digits"}}, "model": {"architecture": "tiny"}}
    write_json(run.config, {"task": {"target": "foggy", "protected": None}, "certify": certify, **rest})
    table = [{"example_id": row["example_id"], "class": row["task"], "role": "sealed"} for row in rows(spec)]
    table += [{"example_id": f"dev-{k}", "class": "clear", "role": "dev"} for k in range(9)]
    pq.write_table(pa.Table.from_pylist(table), run.roles)
    run.model.mkdir()
    (run.model / "model.safetensors").write_bytes(b"weights")
    return run


FULL = {**GOOD, "foggy": (60, 20, 1)}


def test_certificate_of_a_run(tmp_path: Path) -> None:
    run, ledger = run_folder(tmp_path / "run", FULL), Ledger(tmp_path / "ledger")
    sealed = read_sealed_claim(run, single={"snowy": 0.03})
    assert sealed.settings.margins == {"clear": 0.02, "snowy": 0.03}
    assert sealed.images == {"clear": 500, "snowy": 400, "foggy": 60}
    outcome, _ = query(ledger, FULL, sealed)
    path = write_run_certificate(run, sealed, outcome, ledger)
    assert path == run.certificate
    held = verify_certificate(run.certificate)
    assert held["report"]["verdict"] == "certified"
    assert held["identities"]["parent"] == "sha256:old"
    assert held["ledger"]["entries"][-1]["passed"]
    assert set(held["files"]) >= {"roles of the data", "new model", "predictions of the old model"}
    (run.model / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(FaultError, match="new model changed"):
        verify_certificate(run.certificate)


def refingerprinted(certificate: dict[str, object]) -> dict[str, object]:
    body = {name: value for name, value in certificate.items() if name != "fingerprint"}
    return {**body, "fingerprint": fingerprint_json(body)}


def test_certificates_of_odd_shapes_are_one_sentence(tmp_path: Path, tried: Callable[..., None]) -> None:
    """Even of somebody who knows how a fingerprint is made."""
    groups = {"rare": ["clear", "snowy"]}
    path = certificate(tmp_path, Settings({"rare": 0.02}, groups=groups))
    good = json.loads(path.read_text())

    def use(wrong: object) -> None:
        whole = wrong
        with suppress(AttributeError, TypeError, ValueError):
            whole = refingerprinted(wrong)  # type: ignore[arg-type]
        path.write_text(json.dumps(whole))
        verify_certificate(path)

    parts = malformed({**good, "report": {**good["report"], "promise": "short"}}, 300)
    assert refusals(use, parts, tried) > 250


def test_certificates_without_end_are_one_sentence(tmp_path: Path, tried: Callable[..., None]) -> None:
    path = tmp_path / "certificate.json"
    for depth in (300, 700, *range(900, 1010, 10), 100_000):
        for text in ('"x":' + "[" * depth + "]" * depth, '"x":' + '{"a":' * depth + "1" + "}" * depth):
            tried("bad inputs")
            path.write_text('{"format":"holdfast-certificate/1",' + text + "}")
            with pytest.raises((UserError, FaultError)):
                verify_certificate(path)


@pytest.mark.parametrize(
    ("part", "wrong", "message"),
    [
        ("settings", {"claim": "some"}, "settings.claim"),
        ("settings", {"margins": {}}, "settings.margins"),
        ("settings", {"margins": {"clear": 1.0}}, "settings.margins"),
        ("settings", {"margins": {"claer": 0.02}}, "'claer' has no images"),
        ("settings", {"target": "tunnel"}, "'tunnel' has no images"),
        ("settings", {"confidence": 0.9999999999999}, "is not usable"),
        ("settings", {"level": 1e-12}, "a level of 1e-12 is not usable"),
        ("settings", {"extra": 1}, "unknown setting 'extra'"),
        ("report", {"lemma_1": None}, "report.lemma_1"),
        ("report", {"lemma_1": {"C": 0, "alpha": 1e308}}, "report.lemma_1.alpha"),
        ("report", {"verdict": "perhaps"}, "report.verdict"),
        ("files", {"predictions": "p.csv"}, "files.predictions"),
        ("files", {"predictions": {"path": "x" * 5000, "fingerprint": ""}}, "does not exist"),
        ("files", {"predictions": {"path": "/dev/zero", "fingerprint": ""}}, "does not exist"),
    ],
    ids=str,
)
def test_what_a_certificate_must_hold(
    part: str, wrong: dict[str, object], message: str, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    path = certificate(tmp_path)
    good = json.loads(path.read_text())
    path.write_text(json.dumps(refingerprinted({**good, part: {**good[part], **wrong}})))
    with pytest.raises(UserError) as caught:
        verify_certificate(path)
    assert message in caught.value.text()


def test_levels_that_no_test_resolves_are_refused_before_a_look(tried: Callable[..., None]) -> None:
    for wrong in ({"confidence": 0.9999999999999}, {"confidence": 1e-300}, {"queries": 10**8}, {"confidence": 0.3}):
        tried("bad inputs")
        with pytest.raises(UserError, match="is not usable"):
            plan(GOOD, **wrong)
    assert plan(GOOD, queries=10**6).settings.delta == pytest.approx(5e-8)
