"""The ledger: budgets, crashes, two processes at once."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from holdfast.certify.ledger import Budget, Ledger, default_ledger
from holdfast.chained import ChainedLog
from holdfast.errors import Exit, FaultError, HoldfastError, UndecidedError, UserError

SET = "sha256:" + "ab" * 32


def test_levels() -> None:
    assert Budget(0.05).level == 0.05
    assert Budget(0.05, queries=100).level == pytest.approx(0.0005)
    # δ / sum_{j<B} J^j C(R, j+1)
    assert Budget(0.05, queries=4, passes=2, candidates=3).level == pytest.approx(0.05 / (4 + 3 * 6))
    assert Budget(0.05, queries=4, passes=3, candidates=3).level == pytest.approx(0.05 / (4 + 3 * 6 + 9 * 4))


@pytest.mark.parametrize(
    "wrong", [{"queries": 0}, {"passes": 0}, {"queries": 1, "passes": 2}, {"delta": 1.0}, {"candidates": 0}]
)
def test_budgets_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Budget(**wrong)


def test_looks_are_counted_and_the_next_is_refused(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(queries=2)
    assert ledger.standing(SET) is None
    for number in (1, 2):
        with ledger.query(SET, budget, tasks=["a"], margins={"a": 0.02}) as query:
            assert query.number == number
            query.close(False, "never told")
    standing = ledger.standing(SET)
    assert standing is not None
    assert (standing.queries, standing.passes, standing.retired, standing.queries_left) == (2, 0, True, 0)
    with pytest.raises(UndecidedError, match="spent") as refused, ledger.query(SET, budget):
        pytest.fail("a spent set was opened")
    assert refused.value.exit_code == Exit.UNDECIDED
    assert len(ledger.entries(SET)) == 5
    assert [entry["which"] for entry in ledger.entries(SET) if entry["event"] == "result"] == [None, None]


def test_the_first_pass_retires_the_set(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(queries=10)
    with ledger.query(SET, budget) as query:
        query.close(True, "step-100")
    standing = ledger.standing(SET)
    assert standing is not None
    assert standing.retired
    assert standing.last_passed
    with pytest.raises(UndecidedError, match="passed once"), ledger.query(SET, budget):
        pass


def test_the_look_is_on_disk_before_the_block_is_entered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.query(SET, Budget(queries=3)) as query:
        lines = ledger.path(SET).read_text().splitlines()
        assert json.loads(lines[-1])["event"] == "query"
        query.close(False)


def test_an_error_inside_leaves_a_look_without_a_result(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(RuntimeError), ledger.query(SET, Budget(queries=2)):
        raise RuntimeError("out of memory")
    standing = ledger.standing(SET)
    assert standing is not None
    assert (standing.queries, standing.passes, standing.last_passed) == (1, 0, None)


def _crash(folder: Path, claim: str) -> None:
    with Ledger(folder).query(SET, Budget(), claim=claim, run="mine"):
        os._exit(9)  # as a power cut: no `finally` runs


def _crashed(folder: Path, claim: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=_crash, args=(folder, claim))
    process.start()
    process.join()
    assert process.exitcode == 9


def test_a_look_without_a_result_is_made_again_for_the_same_claim_alone(tmp_path: Path) -> None:
    _crashed(tmp_path, "this model keeps its classes")
    ledger = Ledger(tmp_path)
    standing = ledger.standing(SET)
    assert standing is not None
    assert (standing.queries, standing.last_passed) == (1, None)
    for claim in ("another model keeps its classes", ""):
        with pytest.raises(UndecidedError, match="spent"), ledger.query(SET, Budget(), claim=claim):
            pytest.fail("a look was given away")
    with ledger.query(SET, Budget(), claim="this model keeps its classes") as query:
        assert (query.number, query.recorded) == (1, None)
        query.close(True, "step-100")
    assert [entry["event"] for entry in ledger.entries(SET)] == ["opened", "query", "result"]


def test_a_result_on_record_is_the_result(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.query(SET, Budget(), claim="a") as query:
        query.close(True, "step-100")
    before = ledger.path(SET).read_bytes()
    with ledger.query(SET, Budget(), claim="a") as again:
        assert again.recorded is not None
        assert (again.recorded.passed, again.recorded.which) == (True, "step-100")
        again.close(True, "step-100")
    assert ledger.path(SET).read_bytes() == before
    with ledger.query(SET, Budget(), claim="a") as again, pytest.raises(FaultError, match="came out otherwise"):
        again.close(False)
    assert ledger.path(SET).read_bytes() == before


def test_a_budget_is_asked_for_before_anything_is_spent(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.check(SET, Budget(), run="mine")  # never looked at
    with ledger.query(SET, Budget(queries=2), run="mine", claim="a"):
        pass
    ledger.check(SET, Budget(queries=2), run="another")  # one look is left
    with pytest.raises(UserError, match="another budget"):
        ledger.check(SET, Budget(queries=3), run="mine")
    with ledger.query(SET, Budget(queries=2), run="another", claim="b") as query:
        query.close(False)
    with pytest.raises(UserError, match="spent"):
        ledger.check(SET, Budget(queries=2), run="third")
    with pytest.raises(UserError, match="spent"):
        ledger.check(SET, Budget(queries=2), run="another")
    ledger.check(SET, Budget(queries=2), run="another", resumed=True)  # it comes back for its result
    ledger.check(SET, Budget(queries=2), run="mine")  # its look has no result yet
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Ledger(tmp_path / "file").check(SET, Budget())
    with pytest.raises(UserError, match="cannot be read"):
        Ledger(tmp_path / "file").check(SET, Budget(), to_query=False)


def test_to_read_a_ledger_needs_no_permission_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's ledger, or a medium that is read-only; a query there is refused before it is made."""
    ledger = Ledger(tmp_path / "ledger")
    with ledger.query(SET, Budget(queries=2)) as query:
        query.close(False)
    before = {path: path.read_bytes() for path in ledger.folder.iterdir()}
    monkeypatch.setattr("os.access", lambda _, mode: not mode & os.W_OK)
    monkeypatch.setattr(ChainedLog, "locked", lambda _: pytest.fail("locked"))
    for place in (ledger, Ledger(tmp_path / "none" / "yet")):
        assert len(place.check(SET, Budget(queries=2), to_query=False).ids) == 1
        with pytest.raises(UserError, match="cannot be written"):
            place.check(SET, Budget(queries=2))
        with pytest.raises(UserError, match="cannot be written"), place.query(SET, Budget(queries=2)):
            pass
    assert ledger.standing(SET) is not None
    assert {path: path.read_bytes() for path in ledger.folder.iterdir()} == before


def test_a_ledger_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    with ledger.query(SET, Budget()) as query:
        query.close(True)

    def closed(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", closed)
    for ask in (lambda: ledger.check(SET, Budget(), to_query=False), ledger.families):
        with pytest.raises(UserError, match="cannot be read"):
            ask()


@pytest.mark.parametrize("torn", [b'{"event": "look", "num', b"{"])
def test_a_look_that_was_cut_short_on_its_way_to_the_disk_was_none(tmp_path: Path, torn: bytes) -> None:
    """Images are predicted when the whole line is on disk: whoever wrote half of it had seen nothing."""
    ledger, budget = Ledger(tmp_path), Budget(queries=2)
    with ledger.query(SET, budget) as query:
        query.close(False)
    with ledger.path(SET).open("ab") as file:
        file.write(torn)
    standing = ledger.standing(SET)
    assert standing is not None
    assert standing.queries == 1
    with ledger.query(SET, budget) as query:
        assert query.number == 2
        query.close(False)
    with pytest.raises(UndecidedError), ledger.query(SET, budget):
        pass


def test_a_whole_line_that_cannot_be_read_counts_as_a_look(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(queries=3)
    with ledger.query(SET, budget) as query:
        query.close(False)
    with ledger.path(SET).open("ab") as file:
        file.write(b'{"event": "look", "num\n')
    standing = ledger.standing(SET)
    assert standing is not None
    assert standing.queries == 2


def test_a_first_line_cut_short_is_no_dead_end(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.path(SET).write_bytes(b'{"event": "op')
    with ledger.query(SET, Budget()) as query:
        assert query.number == 1


def test_a_changed_record_is_refused(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(queries=3)
    for _ in range(2):
        with ledger.query(SET, budget) as query:
            query.close(False)
    lines = ledger.path(SET).read_text().splitlines(keepends=True)
    ledger.path(SET).write_text("".join([lines[0], *lines[3:]]))  # one look taken out
    with pytest.raises(UserError, match="was changed"), ledger.query(SET, budget):
        pass


def test_candidates_of_a_query_count_where_more_than_one_may_pass(tmp_path: Path) -> None:
    """A version that makes more candidates goes on with a set that another one opened: the level is the same."""
    ledger, one, two = Ledger(tmp_path), "a" * 64, "b" * 64
    assert Budget(queries=2, candidates=24).level == Budget(queries=2, candidates=30).level
    with ledger.query(one, Budget(queries=2, candidates=24)) as query:
        query.close(False)
    with ledger.query(one, Budget(queries=2, candidates=30)) as query:
        query.close(False)
    with ledger.query(two, Budget(queries=2, passes=2, candidates=24)):
        pass
    with (
        pytest.raises(UserError, match="another budget"),
        ledger.query(two, Budget(queries=2, passes=2, candidates=30)),
    ):
        pass


def test_budget_is_fixed_at_the_first_look(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.query(SET, Budget(queries=3)):
        pass
    with pytest.raises(UserError, match="another budget"), ledger.query(SET, Budget(queries=30)):
        pass
    assert ledger.standing(SET).queries == 1  # type: ignore[union-attr]
    several = Budget(queries=3, passes=2, candidates=2)
    with pytest.raises(UserError, match="candidates"), ledger.query("sha256:other", several, candidates=3):
        pass
    assert ledger.standing("sha256:other") is None


def _spend(folder: Path, results: multiprocessing.Queue) -> None:
    spent = 0
    for _ in range(5):
        try:
            with Ledger(folder).query(SET, Budget(queries=6)) as query:
                query.close(False)
            spent += 1
        except HoldfastError:
            pass
    results.put(spent)


def test_two_processes_do_not_spend_it_twice(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_spend, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    spent = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    assert spent == 6
    numbers = [entry["number"] for entry in Ledger(tmp_path).entries(SET) if entry["event"] == "query"]
    assert numbers == [1, 2, 3, 4, 5, 6]


def test_a_look_is_closed_once_and_the_folder_must_be_writable(tmp_path: Path) -> None:
    with Ledger(tmp_path).query(SET, Budget(queries=2)) as query:
        query.close(False)
        with pytest.raises(ValueError, match="once"):
            query.close(True)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), Ledger(tmp_path / "file").query(SET, Budget()):
        pass


def test_where_the_ledger_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_LEDGER", str(tmp_path / "here"))
    assert default_ledger() == tmp_path / "here"
    monkeypatch.delenv("HOLDFAST_LEDGER")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_ledger() == tmp_path / "holdfast" / "ledger"
