"""The documents hold together: every one is reachable, every link leads somewhere, every package has its place."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "echostore"
ENTRANCES = (ROOT / "README.md", ROOT / "ARCHITECTURE.md", DOCS / "README.md")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?\s*\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
MACHINE_PATH = re.compile(r"(?<![\w.\])}])/(?:work|root|home/\w+|Users/\w+)/")
TEST_NAME = re.compile(r"`?(test_\w+\.py)`?")


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def prose(path: Path) -> str:
    """The text of a document without its code, where brackets mean something else."""
    return INLINE_CODE.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))


def links(path: Path) -> list[str]:
    return [target for target in LINK.findall(prose(path)) if not re.match(r"[a-z]+:|#", target)]


def resolved(path: Path, target: str) -> Path:
    return (path.parent / target.partition("#")[0]).resolve()


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", documents(), ids=shown)
def test_every_relative_link_leads_somewhere(path: Path) -> None:
    assert [target for target in links(path) if not resolved(path, target).exists()] == []


def test_every_document_is_linked_from_an_entrance() -> None:
    reachable = {resolved(entrance, target) for entrance in ENTRANCES for target in links(entrance)}
    missing = [shown(path) for path in documents() if path not in ENTRANCES and path.resolve() not in reachable]
    assert missing == []


def test_the_entrances_lead_to_each_other() -> None:
    assert {resolved(ENTRANCES[0], target) for target in links(ENTRANCES[0])} >= set(ENTRANCES[1:])


def test_every_package_has_its_place_in_the_architecture() -> None:
    table = ENTRANCES[1].read_text(encoding="utf-8").partition("## Where is X?")[2].partition("\n## ")[0]
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    packages |= {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")}
    assert packages, "no packages were found"
    assert sorted(name for name in packages if f"**`echostore.{name}`**" not in table) == []


def test_no_document_names_a_path_of_a_machine() -> None:
    assert [shown(path) for path in documents() if MACHINE_PATH.search(path.read_text(encoding="utf-8"))] == []


def test_test_files_named_in_documents_exist() -> None:
    named = {(shown(path), name) for path in documents() for name in TEST_NAME.findall(path.read_text("utf-8"))}
    assert sorted(pair for pair in named if not any((ROOT / "tests").rglob(pair[1]))) == []


def test_decisions_are_numbered_without_a_gap() -> None:
    names = sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        text = (DOCS / "decisions" / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {int(name[:4])}. "), f"{name} does not begin with its number"
        for part in ("**Context.**", "**Options that lost**", "**Decision.**", "**Consequences.**"):
            assert part in text, f"{name} lacks {part}"


def test_every_benchmark_is_described() -> None:
    from echostore.bench import BENCHES

    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert [name for name in BENCHES if f"| `{name}` |" not in page] == []
