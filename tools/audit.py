"""Audit the locked dependencies against advisory sources: `make audit`.

    a known vulnerability        named, exit status 1
    none, all were audited       said, 0
    a source is out of reach     the next one is tried; if all are, that is said in one line, 0

pip-audit asks the sources. It counts a dependency that a source does not know as skipped, and so a source that knows none of
them, such as a mirror without advisories, is taken for one that is out of reach.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements.lock"
SOURCES = ("pypi", "osv")
AUDIT_S = 120.0
SOCKET_S = 10

Ask = Callable[[str], str]
"""What pip-audit prints for one source, as JSON; OSError or SubprocessError when it does not come to an end."""


def ask(source: str) -> str:
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--disable-pip", "--require-hashes"]
    options = ["--vulnerability-service", source, "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(
        [*command, *options, "--timeout", str(SOCKET_S)], capture_output=True, text=True, timeout=AUDIT_S, check=False
    )
    return done.stdout


def audit(ask: Ask, sources: Sequence[str] = SOURCES) -> tuple[list[str], int]:
    """What to print, and the exit status."""
    for source in sources:
        try:
            found: list[dict[str, Any]] = json.loads(ask(source))["dependencies"]
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
            continue
        skipped = [each["name"] for each in found if "skip_reason" in each]
        audited = [each for each in found if "skip_reason" not in each]
        if not audited:
            continue
        said = [
            f"audit: {each['name']} {each['version']} has {known['id']}, mended in "
            f"{', '.join(known.get('fix_versions') or ['no version'])}"
            for each in audited
            for known in each["vulns"]
        ]
        if skipped:
            said.append(f"audit: {source} does not know {len(skipped)} of {len(found)}: {', '.join(skipped)}")
        vulnerable = sum(bool(each["vulns"]) for each in audited)
        said.append(f"audit: {len(audited)} locked dependencies audited by {source}, {vulnerable} with a vulnerability")
        return said, 1 if vulnerable else 0
    tried = " or ".join(sources)
    return [
        f"audit: NOT DONE: no advisory source could be reached ({tried}), nothing is known of the locked versions"
    ], 0


def main() -> int:
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: pip-audit is missing: run `make setup`")
        return 1
    said, status = audit(ask)
    print("\n".join(said))
    return status


if __name__ == "__main__":
    sys.exit(main())
