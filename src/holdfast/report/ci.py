"""The report of ``holdfast certify`` for machines that read test results: JUnit XML and SARIF 2.1.0.

Both show what the terminal shows and no more: of a sealed set that is not retired, that the query passed or did not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from holdfast._version import __version__
from holdfast.certify.report import advice
from holdfast.files import fingerprint_json

SUITE = "holdfast certify"
SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES = {
    "regressed": "A task lost more than its margin, and that is shown",
    "undecided": "The evidence does not suffice to certify a task within its margin",
    "not-passed": "A query of a sealed set did not pass",
    "missing": "A task that the policy of a gate requires was not measured",
}


@dataclass(frozen=True)
class Case:
    """One task, or one query of a sealed set, as a test that passed or failed."""

    name: str
    rule: str | None  # why it failed; None: it passed
    message: str


def cases(reported: Mapping[str, Any]) -> list[Case]:
    """What was tested: task by task where that may be shown, else the query as a whole."""
    sealed = reported.get("sealed")
    if sealed is not None and not (sealed["retired"] and "devsafety" in reported):
        left = f"{sealed['queries_left']} queries left; nothing more is shown before the set is retired"
        passed = sealed["passed"]
        message = f"query {sealed['queries']} {'passed' if passed else 'did not pass'}: {left}"
        return [Case(f"sealed set {sealed['set'][7:19]}", None if passed else "not-passed", message)]
    target = reported.get("target")
    found = [_case(row, reported, row["task"]) for row in reported["tasks"]]
    missing = (reported.get("gate") or {}).get("missing", {})
    found += [Case(name, "missing", f"{name}: required by the policy, {why}") for name, why in missing.items()]
    return [*found, *([_case(target, reported, f"{target['task']} (target)")] if target else [])]


def _case(row: Mapping[str, Any], reported: Mapping[str, Any], name: str) -> Case:
    counts = f"{row['n']} images, {row['gained']} positive and {row['lost']} negative flips"
    change = f"change {row['difference'] * 100:+.2f} points, margin {row['margin'] * 100:g}"
    message = f"{row['task']}: {row['verdict']}: {counts}, {change}"
    if row["verdict"] == "undecided" and reported["claim"] != "sequential":
        message += f". {advice(row)}"
    return Case(name, None if row["verdict"] == "certified" else row["verdict"], message)


def junit_xml(reported: Mapping[str, Any]) -> str:
    """JUnit XML: one test suite, one test case a task, a failure for each that is not certified."""
    found = cases(reported)
    failures = sum(case.rule is not None for case in found)
    numbers = {"tests": str(len(found)), "failures": str(failures), "errors": "0", "skipped": "0", "time": "0"}
    whole = ElementTree.Element("testsuites", {"name": SUITE, **numbers})
    suite = ElementTree.SubElement(whole, "testsuite", {"name": SUITE, **numbers})
    properties = ElementTree.SubElement(suite, "properties")
    facts = {"verdict": reported["verdict"], "confidence": reported["confidence"], "claim": reported["claim"]}
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": _xml(str(value))})
    for case in found:
        item = {"classname": "holdfast.certify", "name": _xml(case.name), "time": "0"}
        node = ElementTree.SubElement(suite, "testcase", item)
        if case.rule is not None:
            attributes = {"message": _xml(case.message), "type": case.rule}
            failure = ElementTree.SubElement(node, "failure", attributes)
            failure.text = _xml(f"{case.message}\n{reported.get('claim_tested', '')}".strip())
    ElementTree.indent(whole)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(whole, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold, in any spelling."""
    return "".join(letter if _in_xml(ord(letter)) else "�" for letter in text)


def _in_xml(code: int) -> bool:
    return code in (0x9, 0xA, 0xD) or 0x20 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or 0x10000 <= code <= 0x10FFFF


def sarif_json(reported: Mapping[str, Any], subject: Path) -> str:
    """SARIF 2.1.0: a result for each task that is not certified, at the file of predictions that shows it."""
    rules = list(RULES)
    results = [
        {
            "ruleId": case.rule,
            "ruleIndex": rules.index(case.rule),
            "level": "error" if case.rule == "regressed" else "warning",
            "message": {"text": _sarif(case.message)},
            "locations": [
                {
                    "physicalLocation": {"artifactLocation": {"uri": _uri(subject)}, "region": {"startLine": 1}},
                    "logicalLocations": [{"name": case.name, "kind": "member"}],
                }
            ],
            "partialFingerprints": {"task/v1": fingerprint_json([case.rule, case.name]).removeprefix("sha256:")},
        }
        for case in cases(reported)
        if case.rule is not None
    ]
    driver = {
        "name": "holdfast",
        "version": __version__,
        "rules": [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()],
    }
    properties = {"verdict": reported["verdict"], "confidence": reported["confidence"], "claim": reported["claim"]}
    run = {
        "tool": {"driver": driver},
        "invocations": [{"executionSuccessful": True}],
        "results": results,
        "properties": properties,
    }
    log = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _sarif(text: str) -> str:
    """Plain text as a SARIF message: braces would be placeholders (3.11.5), brackets links (3.11.6)."""
    text = text.replace("\\", "\\\\").replace("{", "{{").replace("}", "}}")
    return text.replace("[", "\\[").replace("]", "\\]")


def _uri(path: Path) -> str:
    """A relative reference, for a viewer that knows where the repository is."""
    try:
        path = path.resolve().relative_to(Path.cwd().resolve())
    except ValueError:
        path = Path(path.name)
    return quote(path.as_posix(), safe="/")
