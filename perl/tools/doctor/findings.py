"""What a check says, and how a list of such answers is printed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass

from perl.tools.doctor.machine import Machine

OK, WARNING, FAILURE = "ok", "warning", "failure"
CAREFUL = re.compile(r"…|\b(reboot|reset|kill|docker|uninstall|newgrp|--upgrade|--full)\b")
"""Commands that a pasted script must not run by itself."""


@dataclass(frozen=True)
class Finding:
    """The answer of one check."""

    status: str
    """OK, WARNING (works, or works in part) or FAILURE (training or evaluation will not run)."""
    found: str
    why: str = ""
    """Why it matters, in a clause. Empty when all is well."""
    fix: str = ""
    """The command that fixes it. Empty when all is well, or when only a person with the hardware can."""


def ok(found: str) -> Finding:
    return Finding(OK, found)


def warning(found: str, why: str, fix: str) -> Finding:
    return Finding(WARNING, found, why, fix)


def failure(found: str, why: str, fix: str) -> Finding:
    return Finding(FAILURE, found, why, fix)


def exit_code(findings: dict[str, Finding]) -> int:
    return 1 if any(finding.status == FAILURE for finding in findings.values()) else 0


def as_text(machine: Machine, findings: dict[str, Finding], fix_hints: bool) -> str:
    """One line a check; with `fix_hints` the commands once more, as a script to paste."""
    width = max(len(name) for name in findings)
    lines = []
    for name, finding in findings.items():
        parts = [finding.found, finding.why, f"fix: {finding.fix}" if finding.fix else ""]
        text = " | ".join(" ".join(part.split()) for part in parts if part)
        lines.append(f"{finding.status:<7}  {name:<{width}}  {text}")
    if machine.unfinished:
        lines.append(f"not known, because it did not end in time: {', '.join(machine.unfinished)}")
    counts = Counter(finding.status for finding in findings.values())
    lines.append(f"{machine.kind}: {counts[OK]} ok, {counts[WARNING]} warnings, {counts[FAILURE]} failures")
    if fix_hints:
        lines += [
            "",
            "# What fixes it, failures first. Commented out: what has a gap to fill in (…) or interrupts others.",
        ]
        for status in (FAILURE, WARNING):
            for name, finding in findings.items():
                if finding.status == status and finding.fix:
                    careful = "# " if CAREFUL.search(finding.fix) else ""
                    lines += [f"# {status}: {name}", careful + finding.fix]
    return "\n".join(lines)


def as_json(machine: Machine, findings: dict[str, Finding], fix_hints: bool) -> str:
    """One object: kind, exit code, and each check's status, found, why and (with `fix_hints`, alone) commands."""
    report: dict[str, object] = {
        "kind": machine.kind,
        "exit_code": exit_code(findings),
        "unfinished": machine.unfinished,
        "checks": {name: asdict(finding) for name, finding in findings.items()},
    }
    if fix_hints:
        report["fixes"] = [f.fix for s in (FAILURE, WARNING) for f in findings.values() if f.status == s and f.fix]
    return json.dumps(report, ensure_ascii=False, indent=2)
