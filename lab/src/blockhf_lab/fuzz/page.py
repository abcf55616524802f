"""``docs/reliability.md`` from the records of the campaigns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blockhf_lab import files
from blockhf_lab.claims_page import fill
from blockhf_lab.fuzz.campaign import failing

RECORDS = ("cases", "interrupts", "kills")
"""The campaigns, each with a record of its own."""


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records that there are.

    Raises:
        ValueError: There is none, or one cannot be read.
    """
    paths = {name: folder / f"{name}.json" for name in RECORDS}
    found = {name: files.read_json(path) for name, path in paths.items() if path.exists()}
    if not found:
        raise ValueError(f"There is no record in {folder}: no {', '.join(p.name for p in paths.values())}.")
    return found


def parts(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What the page holds between its markers, by the markers' names."""
    return {
        "summary": _table(
            ["campaign", "trials", "findings", "still failing", "refused", "CPU time"],
            [[name, *_row(found.get(name))] for name in RECORDS],
        ),
        "commands": _commands(found),
        "checks": _table(
            ["check", "passed"],
            [[name, f"{number:,}"] for name, number in found.get("cases", {}).get("checks", {}).items()],
        ),
        "kinds": _kinds(found.get("cases", {})),
        "outcomes": _outcomes(found.get("interrupts", {})),
        "ends": _kills(found.get("kills", {})),
        "refusals": _refusals(found),
        "findings": _findings(found),
    }


def write(folder: Path, page: Path) -> None:
    """Make the generated parts of the page anew."""
    text = fill(page.read_text(encoding="utf-8"), parts(records(folder)))
    files.write(page, text.encode())


def _row(record: Mapping[str, Any] | None) -> list[str]:
    if record is None:
        return ["not run", "", "", "", ""]
    if "ends" in record:  # of kills
        faults = len(record["faults"])
        return [f"{record['ends']:,}", str(faults), str(faults), "", ""]
    wanted, findings = record["number"], record["findings"]
    done = f"{record['done']:,}" + (f" of {wanted:,}" if wanted > record["done"] else "")
    minutes = f"{record['cpu_seconds'] / 60:.0f} min"
    return [done, str(len(findings)), str(len(failing(dict(record)))), f"{record['refused']:,}", minutes]


def _commands(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for record in found.values():
        known = record.get("versions") or record.get("environment", {})
        names = [name for name in ("blockhf", "torch", "python", "commit") if name in known]
        versions = ", ".join(f"{name} {str(known[name])[:12]}" for name in names)
        lines.append(f"- `{record['command']}`, with {versions}")
    return "\n".join(lines)


def _kills(record: Mapping[str, Any]) -> str:
    ways = [[way["what"], f"{way['ends']:,}"] for way in record.get("ways", {}).values()]
    places = [[place, f"{number:,}"] for place, number in record.get("places", {}).items()]
    return "\n\n".join([_table(["how a run ends", "times"], ways), _table(["where", "times"], places)])


def _kinds(record: Mapping[str, Any]) -> str:
    rows = []
    for what, kinds in record.get("kinds", {}).items():
        rows.append([what, ", ".join(f"{kind} {number:,}" for kind, number in kinds.items())])
    return _table(["", "how often"], rows)


def _outcomes(record: Mapping[str, Any]) -> str:
    outcomes = record.get("kinds", {}).get("outcome", {})
    return _table(
        ["the step was", "interrupts"], [[name, f"{number:,}"] for name, number in outcomes.items()]
    )


def _refusals(found: Mapping[str, Mapping[str, Any]]) -> str:
    total: dict[str, int] = {}
    for record in found.values():
        for kind, number in record.get("refusals", {}).items():
            total[kind] = total.get(kind, 0) + number
    rows = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    return _table(["error", "times"], [[f"`{kind}` …", f"{number:,}"] for kind, number in rows])


def _findings(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        [name, str(finding["trial"]), finding["what"].replace("|", "/"), finding.get("now", "fails")]
        for name, record in found.items()
        for finding in record.get("findings", [])
    ]
    return _table(["campaign", "trial", "what", "now"], rows) if rows else "None."


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "Not run."
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))
