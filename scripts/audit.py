"""Known vulnerabilities of the installed packages: pip-audit, with the reasons for those that are accepted.

    python scripts/audit.py          (make audit; .ci/run ends with it)

Exit code 0: none but accepted ones, or the service of the advisories can't be reached, which one line says. 1: at least
one, each with a line. The advisories are those of OSV (https://osv.dev), which holds PyPI's and GitHub's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig

OSV = "https://api.osv.dev/v1/query"
ACCEPTED: dict[str, str] = {}
"""Id of an advisory (or another of its names) -> why it does not concern perl. An entry goes when the package does."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=sysconfig.get_path("purelib"), help="folder of the packages")
    parser.add_argument("--osv_url", default=OSV, help="address of the service")
    args = parser.parse_args(argv)
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--path", args.path]
    done = subprocess.run(
        [*command, "--vulnerability-service", "osv", "--osv-url", args.osv_url],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        print(f"audit: not done, {args.osv_url} can't be asked: {last}")
        return 0 if "ConnectionError" in last or "Timeout" in last else 1
    packages = json.loads(done.stdout)["dependencies"]
    return judge(packages)


def judge(packages: list[dict]) -> int:
    """Print what is known of the packages; 1 where something is not accepted."""
    left_out = [package["name"] for package in packages if "skip_reason" in package]
    advisories = [(package, vuln) for package in packages for vuln in package.get("vulns", [])]
    refused = 0
    for package, vuln in advisories:
        reason = next((ACCEPTED[name] for name in (vuln["id"], *vuln["aliases"]) if name in ACCEPTED), None)
        refused += reason is None
        remedy = f"fixed in {', '.join(vuln['fix_versions'])}" if vuln["fix_versions"] else "not fixed yet"
        print(f"{package['name']} {package['version']}: {vuln['id']}, {f'accepted: {reason}' if reason else remedy}")
    print(f"audit: {len(packages) - len(left_out)} packages, {len(advisories)} advisories, {refused} not accepted")
    if left_out:
        print(f"audit: not known to the service: {', '.join(left_out)}")
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
