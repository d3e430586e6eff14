"""The report for others: SARIF 2.1.0 for code scanning in CI, and one HTML page without anything to load."""

from __future__ import annotations

import html
from typing import Any
from urllib.parse import quote

from brickformer.doctor.probes import PROBES
from brickformer.doctor.report import Finding, Report


def sarif(report: Report, file: str = "", version: str = "0") -> dict[str, Any]:
    """The report as SARIF. file: where make() stands; a result points there and names the module."""
    rules = [
        {"id": _id(p.name), "name": p.name, "shortDescription": {"text": p.says}, "fullDescription": {"text": p.says}}
        for p in PROBES
    ]
    known = {r["id"] for r in rules}
    for f in report.findings:
        if _id(f.probe) not in known:
            known.add(_id(f.probe))
            text = {"text": f.expected}
            rules.append({"id": _id(f.probe), "name": f.probe, "shortDescription": text, "fullDescription": text})
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "brick doctor",
                        "semanticVersion": version,
                        "informationUri": "https://pypi.org/project/brickformer/",
                        "rules": rules,
                    }
                },
                "results": [_result(f, report, file) for f in report.findings],
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "toolExecutionNotifications": [
                            {
                                "level": "note",
                                "message": {"text": f"{v.probe}: could not be tested, because {v.detail}"},
                            }
                            for v in report.verdicts
                            if v.outcome == "untested"
                        ],
                    }
                ],
            }
        ],
    }


def _id(name: str) -> str:
    return name.replace(" ", "-")


def _result(f: Finding, report: Report, file: str) -> dict[str, Any]:
    place: dict[str, Any] = {"logicalLocations": [{"fullyQualifiedName": f.where or report.name, "kind": "module"}]}
    if file:
        place["physicalLocation"] = {
            "artifactLocation": {"uri": quote(file.replace("\\", "/"))},
            "region": {"startLine": 1},
        }
    text = f"{f.measured}. Expected: {f.expected}. Cause: {f.cause}. Fix: {f.fix}"
    return {
        "ruleId": _id(f.probe),
        "level": f.severity,
        "message": {"text": text},
        "locations": [place],
        "partialFingerprints": {"brickDoctor/v1": f"{report.name}:{f.probe}:{f.where}"},
        "properties": {"confidence": f.confidence, "confirm": f.confirm, "also": list(f.also)},
    }


_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;
background:#fff}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:0}section{border-left:.4rem solid #888;padding:.6rem 1rem;margin:1rem 0;
background:#f6f6f6}section.error{border-color:#b3261e}section.warning{border-color:#b26a00}section.note{border-color:#35618e}
dl{display:grid;grid-template-columns:6rem 1fr;gap:.2rem 1rem;margin:.5rem 0 0}dt{color:#5a5a5a}dd{margin:0}
pre{margin:0;white-space:pre-wrap}table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2rem .6rem;
border-bottom:1px solid #ddd;vertical-align:top}
@media(prefers-color-scheme:dark){body{background:#161616;color:#e6e6e6}section{background:#222}dt{color:#aaa}
td,th{border-color:#444}}"""


def page(report: Report) -> str:
    """One HTML page."""
    e = html.escape
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{e(report.name)}: brick doctor</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
        f"<h1>{e(report.name)}</h1><p>{e(', '.join(report.facts))}</p><p><strong>{e(report.summary())}</strong></p>",
    ]
    for f in report.findings:
        rows = [("measured", f.measured), ("expected", f.expected), ("cause", f.cause), ("fix", f.fix)]
        rows += [("also", also) for also in f.also]
        body = "".join(f"<dt>{name}</dt><dd>{e(text)}</dd>" for name, text in rows)
        if f.confirm:
            body += f"<dt>confirm</dt><dd><pre>{e(f.confirm)}</pre></dd>"
        at = f" at <code>{e(f.where)}</code>" if f.where else ""
        parts.append(
            f'<section class="{f.severity}"><h2>{f.severity}: {e(f.probe)}{at}</h2><dl>{body}'
            f"<dt>confidence</dt><dd>{f.confidence}</dd></dl></section>"
        )
    said = {p.name: p.says for p in PROBES}
    rows_ = "".join(
        f"<tr><td>{e(v.probe)}</td><td>{e(said[v.probe])}</td><td>{_outcome(v.outcome)}</td><td>{e(v.detail)}</td></tr>"
        for v in report.verdicts
    )
    parts.append(
        f"<table><tr><th>probe</th><th>a healthy model</th><th>outcome</th><th></th></tr>{rows_}</table></html>"
    )
    return "\n".join(parts) + "\n"


def _outcome(outcome: str) -> str:
    return "could not be tested, because" if outcome == "untested" else outcome
