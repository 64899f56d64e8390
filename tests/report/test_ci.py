"""JUnit XML and SARIF, read back by other people's rules."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import holdfast
from holdfast.report.ci import RULES, junit_xml, sarif_json
from tests.certify.helpers import rows

SPEC = {"clear": (500, 5, 60), "snowy": (400, 4, 1), "foggy": (20, 0, 0)}
HOSTILE = [
    '<b a="1">&amp;</b>',
    "]]>",
    "a\x00b\x1b[31m",
    "line\nbreak",
    "ü𝔘￾",
    "[click](http://x)",
    "{0} {{",
    "\\",
    "'\"",
    "<!--",
]


def reported(spec: dict[str, tuple[int, int, int]] = SPEC) -> dict[str, Any]:
    table = rows(spec)
    columns = {name: [row[name] for row in table] for name in ("example_id", "task", "label", "old", "new")}
    return holdfast.certify(columns, margin=0.02).to_json()


def named(task: str) -> dict[str, Any]:
    report = reported()
    report["tasks"][0] |= {"task": task}
    return report


def test_junit_has_a_case_a_task_and_a_failure_for_each_that_is_not_certified() -> None:
    root = ElementTree.fromstring(junit_xml(reported()))
    assert root.tag == "testsuites"
    (suite,) = root
    numbers = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert numbers == {"tests": "3", "failures": "2", "errors": "0", "skipped": "0"}
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == ["clear", "foggy", "snowy"]
    for case in cases:
        assert case.get("classname")
        float(case.get("time", ""))
    failures = {case.get("name"): case.find("failure") for case in cases}
    assert failures["snowy"] is None
    for task, kind in (("clear", "regressed"), ("foggy", "undecided")):
        failure = failures[task]
        assert failure is not None
        assert failure.get("type") == kind
        assert f"{task}: {kind}" in str(failure.get("message"))
        assert failure.text
    assert "60 negative flips" in str(failures["clear"].get("message"))  # type: ignore[union-attr]
    # The order of children that the schema of Jenkins asks for.
    assert [child.tag for child in suite] == ["properties", "testcase", "testcase", "testcase"]


@pytest.mark.parametrize("task", HOSTILE)
def test_hostile_names_stay_names(task: str, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 2)
    (suite,) = ElementTree.fromstring(junit_xml(named(task)).encode())
    assert len(suite.findall("testcase")) == 3
    shown = suite.findall("testcase")[0].get("name")
    assert shown == re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "�", task)
    (result, *_) = json.loads(sarif_json(named(task), tmp_path / "new.csv"))["runs"][0]["results"]
    assert result["locations"][0]["logicalLocations"][0]["name"] == task
    text = result["message"]["text"]
    # No placeholder and no link is left once what is escaped is taken away.
    bare = re.sub(r"\\\\|\\\[|\\\]", "", text).replace("{{", "").replace("}}", "")
    assert not re.search(r"[\[\]{}]", bare)


def test_sarif_has_what_the_standard_and_code_scanning_require(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = json.loads(sarif_json(reported(), Path("out/new model.csv")))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "holdfast"
    assert [rule["id"] for rule in driver["rules"]] == list(RULES)
    assert {result["ruleId"]: result["level"] for result in run["results"]} == {
        "regressed": "error",
        "undecided": "warning",
    }
    fingerprints = set()
    for result in run["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "out/new%20model.csv"
        assert location["physicalLocation"]["region"]["startLine"] >= 1
        fingerprints.add(result["partialFingerprints"]["task/v1"])
    assert len(fingerprints) == 2
    assert all(invocation["executionSuccessful"] is True for invocation in run["invocations"])


def test_where_all_is_certified_nothing_fails() -> None:
    good = reported({"clear": (500, 5, 3), "snowy": (400, 4, 1)})
    (suite,) = ElementTree.fromstring(junit_xml(good))
    assert suite.get("failures") == "0"
    assert json.loads(sarif_json(good, Path("new.csv")))["runs"][0]["results"] == []
