"""Write tools/demo_packages.txt: the locked packages that the demonstration needs, by what installed packages require.

Run by `make lock`, after the resolution. The packages of `pipeline`, those of echostore itself, and the build backend of the
editable install are needed; tests, linters and other extras are not.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "tools" / "demo_packages.txt"
EXTRAS = ("pipeline",)
BESIDES = ("setuptools",)


def needed() -> set[str]:
    """Names, as requirements.lock spells them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(each) for each in project["dependencies"]]
    waiting += [Requirement(each) for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    waiting += [Requirement(each) for each in BESIDES]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        for extra in ("", *requirement.extras):
            if (name, extra) in found:
                continue
            found.add((name, extra))
            for text in metadata.requires(name) or ():
                more = Requirement(text)
                if more.marker is None or more.marker.evaluate({"extra": extra}):
                    waiting.append(more)
    return {name for name, _ in found}


if __name__ == "__main__":
    text = "".join(f"{name}\n" for name in sorted(needed()))
    if sys.argv[1:] == ["--check"]:
        sys.exit(
            0 if LISTED.read_text() == text else f"{LISTED.name} is not what pyproject.toml needs; run `make lock`"
        )
    LISTED.write_text(text)
