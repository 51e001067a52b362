"""The verdict on each staged machine: exactly these failures, exactly these warnings, and what is said of them."""

import json
import re
import subprocess

import pytest

from perl.tools.doctor.checks import CHECKS, diagnose
from perl.tools.doctor.findings import FAILURE, OK, WARNING, as_json, as_text, exit_code
from tests.tools.doctor import machines


@pytest.mark.parametrize("name", machines.NAMES)
def test_verdict(name):
    machine, expected = machines.machine(name), machines.expected(name)
    findings = diagnose(machine)
    text = as_text(machine, findings, fix_hints=True)
    assert machine.kind == expected["kind"], text
    assert [check for check, f in findings.items() if f.status == FAILURE] == expected["failures"], text
    assert [check for check, f in findings.items() if f.status == WARNING] == expected["warnings"], text
    assert exit_code(findings) == expected["exit"], text
    for words in expected["says"]:
        assert words in text


def test_every_check_is_staged_to_pass_and_to_complain():
    """A check that no machine makes complain, or none lets pass, is not tested."""
    complained, passed = set(), set()
    for name in machines.NAMES:
        for check, finding in diagnose(machines.machine(name)).items():
            (passed if finding.status == OK else complained).add(check)
    assert complained == set(CHECKS)
    assert passed == set(CHECKS)


@pytest.mark.parametrize("name", machines.NAMES)
def test_complaints_say_why_and_what_to_run(name):
    for check, finding in diagnose(machines.machine(name)).items():
        if finding.status == OK:
            assert not finding.fix, check
            continue
        assert finding.why, check
        assert finding.fix, check
        runnable = re.sub("…|/path/with/space", "x", finding.fix)
        parsed = subprocess.run(["bash", "-n", "-c", runnable], capture_output=True, text=True)
        assert parsed.returncode == 0, f"{check}: {finding.fix}: {parsed.stderr}"


def test_one_line_a_check():
    machine = machines.machine("guide_set")
    findings = diagnose(machine)
    lines = as_text(machine, findings, fix_hints=False).splitlines()
    assert len(lines) == len(findings) + 1  # and the count
    assert all(re.match(r"(ok|warning|failure) ", line) for line in lines[:-1])
    assert lines[-1] == "npu: 23 ok, 0 warnings, 1 failures"


@pytest.mark.parametrize(
    "name", ["container_without_devices", "zombie_holds_device", "driver_waits_for_reboot", "device_alarm"]
)
def test_hints_are_a_script_that_does_no_harm(name):
    machine = machines.machine(name)
    script = as_text(machine, diagnose(machine), fix_hints=True).split("\n\n", 1)[1]
    assert "# failure: " in script
    running = [line for line in script.splitlines() if not line.startswith("#")]
    assert not [line for line in running if re.search(r"…|reboot|kill|docker", line)]
    assert "meanwhile" not in script
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0


def test_json_has_the_same_verdict():
    machine = machines.machine("set_env_not_sourced")
    report = json.loads(as_json(machine, diagnose(machine), fix_hints=True))
    assert report["kind"] == "npu"
    assert report["exit_code"] == 1
    assert report["checks"]["set-env"]["status"] == "failure"
    assert report["fixes"].count("source /usr/local/Ascend/cann-9.1.0/set_env.sh") == 2  # set-env and libraries


def test_misspelt_facts_are_refused():
    with pytest.raises(ValueError, match="unknown facts: enviroment"):
        machines.from_facts({"enviroment": {}})
