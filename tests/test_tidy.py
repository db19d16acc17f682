"""Style rules that no linter knows. Every test checks one rule and names all offenders."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import echostore

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
KERNEL = SOURCE / "echostore" / "kernel"
GENERATED = SOURCE / "echostore" / "wire" / "generated"
LOCK = ROOT / "requirements.lock"
MAP = ROOT / "docs" / "map.md"

VAGUE_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?)$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
LINT_EXCEPTION = re.compile(
    r"""\#\s*(?:
        (?:ruff:\s*)?noqa\b(?::\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?
        | type:\s*ignore(?:\[[^\]]*\])?
        | mypy:\s*[\w-]+(?:=\S+)?
        | pragma:\s*no\s+cover
        | fmt:\s*(?:off|skip)
    )""",
    re.VERBOSE,
)
MACHINE_PATH = re.compile(r"(?<![\w.\])}])/(?:work|root|home/\w+|Users/\w+)/")
REGISTRY_HOST = re.compile(r"[\w.-]*(?:pypi|pythonhosted|artifactory|devpi|nexus)[\w-]*\.[a-z]{2,}\b", re.IGNORECASE)
ADDRESS = re.compile(r"://|\bwww\.|@\s|(?<!\w)(?:/|\./|\.\./|~/)\w")
PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+( --hash=sha256:[0-9a-f]{64})+")

# What makes a result depend on more than the arguments. A name that ends in a dot stands for everything below it.
IMPURE = (
    "time.",
    "random.",
    "secrets.",
    "os.",
    "uuid.uuid1",
    "uuid.uuid4",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
)


@cache
def python_files() -> tuple[Path, ...]:
    """Return the Python files the rules hold for: all below src that are not generated."""
    return tuple(sorted(path for path in SOURCE.rglob("*.py") if GENERATED not in path.parents))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path), filename=str(path))


def place(path: Path, line: int | None = None) -> str:
    """Name a file, or a line of it, the way an editor can open it."""
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


def lines_matching(pattern: re.Pattern[str], paths: tuple[Path, ...]) -> list[str]:
    return [
        f"{place(path, number)}: {line.strip()}"
        for path in paths
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if pattern.search(line)
    ]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text_of(path)).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def must_be_empty(offenders: list[str], rule: str) -> None:
    if offenders:
        pytest.fail("\n  ".join([f"{rule}:", *offenders]), pytrace=False)


def test_source_files_are_found() -> None:
    assert len(python_files()) > 0, "the rules below would hold for nothing"


def test_every_module_has_a_docstring() -> None:
    offenders = [place(path) for path in python_files() if not ast.get_docstring(tree_of(path))]
    must_be_empty(offenders, "module without a docstring")


def test_no_module_has_a_vague_name() -> None:
    folders = {path.parent for path in python_files()}
    offenders = [place(path) for path in sorted({*python_files(), *folders}) if VAGUE_NAMES.search(path.stem)]
    must_be_empty(offenders, "name that says nothing (utils, helpers, common, manager)")


def test_nothing_is_left_unfinished() -> None:
    must_be_empty(lines_matching(UNFINISHED, python_files()), "mark of unfinished work")


def test_no_bare_except() -> None:
    offenders = [
        place(path, node.lineno)
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    must_be_empty(offenders, "bare except")


def test_no_exception_is_swallowed() -> None:
    offenders = [
        place(path, node.lineno)
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if swallows_everything(node)
    ]
    must_be_empty(offenders, "every exception is caught and dropped")


def swallows_everything(node: ast.AST) -> bool:
    if isinstance(node, ast.ExceptHandler):
        does_nothing = all(
            isinstance(statement, ast.Pass | ast.Continue)
            or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            for statement in node.body
        )
        return does_nothing and node.type is not None and names_everything(node.type)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
        return any(names_everything(argument) for argument in node.args)
    return False


def names_everything(kind: ast.expr) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(each, ast.Name) and each.id in ("Exception", "BaseException") for each in kinds)


def test_every_lint_exception_has_a_reason() -> None:
    offenders = [
        f"{place(path, line)}: {comment}"
        for path in python_files()
        for line, comment in comments(path)
        if LINT_EXCEPTION.search(comment) and not re.search(r"\w+\W+\w+", LINT_EXCEPTION.sub("", comment))
    ]
    must_be_empty(offenders, "lint exception without a reason after it")


@pytest.mark.parametrize(
    ("comment", "reasoned"),
    [
        ("# noqa", False),
        ("# noqa: B008", False),
        ("# noqa: B008, E501", False),
        ("# type: ignore[arg-type]", False),
        ("# type: ignore[arg-type]  # noqa: E501", False),
        ("# noqa: B008 the default is immutable", True),
        ("# type: ignore[arg-type]  # the stub forgets bytes", True),
    ],
)
def test_the_reason_of_a_lint_exception_is_recognised(comment: str, reasoned: bool) -> None:
    assert LINT_EXCEPTION.search(comment)
    assert bool(re.search(r"\w+\W+\w+", LINT_EXCEPTION.sub("", comment))) is reasoned


def build_files() -> tuple[Path, ...]:
    """Return the files besides the source that end up on other machines."""
    named = (ROOT / name for name in ("Makefile", "pyproject.toml", "requirements.lock", ".ci/run"))
    schema = (SOURCE / "echostore" / "wire" / "schema").glob("*.proto")
    return tuple(path for path in (*named, *sorted(schema), *sorted((ROOT / "tools").glob("*.py"))) if path.exists())


def test_no_path_of_a_machine() -> None:
    must_be_empty(lines_matching(MACHINE_PATH, (*python_files(), *build_files())), "absolute path of one machine")


def test_no_registry_host() -> None:
    must_be_empty(lines_matching(REGISTRY_HOST, (*python_files(), *build_files())), "name of a package registry")


def test_the_kernel_asks_neither_clock_nor_chance() -> None:
    offenders = [
        f"{place(path, line)}: {name}"
        for path in python_files()
        if KERNEL in path.parents
        for line, name in impure_names(tree_of(path))
    ]
    must_be_empty(offenders, "the kernel depends on more than its arguments")


def impure_names(tree: ast.Module) -> list[tuple[int, str]]:
    """Return where a module uses something impure, whatever name it was imported under."""
    imported: dict[str, str] = {}
    found: set[tuple[int, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imported[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                imported[alias.asname or alias.name] = full
                if is_impure(full):
                    found.add((node.lineno, full))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = ast.unparse(node).partition(".")
            full = f"{imported[first]}.{rest}".rstrip(".") if first in imported else ""
            if is_impure(full):
                found.add((node.lineno, full))
    return sorted(found)


def is_impure(name: str) -> bool:
    return any(name.startswith(each) if each.endswith(".") else name == each for each in IMPURE)


@pytest.mark.parametrize(
    ("source", "impure"),
    [
        ("import time\ntime.time()", True),
        ("import time as clock\nclock.monotonic()", True),
        ("from os import urandom", True),
        ("from uuid import uuid4 as fresh\nfresh()", True),
        ("import uuid\nuuid.UUID(bytes=b'')", False),
        ("import datetime as dt\ndt.datetime.now(dt.UTC)", True),
        ("from datetime import datetime\ndatetime.fromisoformat('2024-01-01')", False),
        ("from datetime import datetime\nread = datetime.now", True),
        ("def f(time: int) -> int:\n    return time.real", False),
    ],
)
def test_impure_names_are_recognised(source: str, impure: bool) -> None:
    assert bool(impure_names(ast.parse(source))) is impure


def requirements() -> list[str]:
    """Return the logical lines of the lock file."""
    return [line for line in text_of(LOCK).replace("\\\n", " ").splitlines() if line.strip()]


# Modules that make objects, or code, out of bytes. RDDs carry their rows as pickles.
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
UNSAFE_NAMES = {"rdd", "parallelize", "sparkContext", "json_format", "eval", "exec"}


def unsafe_bytes(source: str) -> list[str]:
    """Where a module could make objects out of bytes that somebody else wrote."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module or ""] if (node.module or "").split(".")[0] in UNSAFE_MODULES else []
            found += [name.name for name in node.names if name.name in UNSAFE_NAMES]
        elif isinstance(node, ast.Attribute) and node.attr in UNSAFE_NAMES - {"eval", "exec", "sparkContext"}:
            found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            found.append(node.func.id)
    return found


def test_no_object_is_made_of_foreign_bytes() -> None:
    """In the package that is imported: what tests run against, also where that is a copy of src."""
    source = Path(echostore.__file__).parents[1]
    generated = source / "echostore" / "wire" / "generated"
    packages = [source / path.relative_to(SOURCE) for path in SOURCE.iterdir() if (path / "__init__.py").exists()]
    paths = [path for each in packages for path in sorted(each.rglob("*.py")) if generated not in path.parents]
    assert len(packages) == 2
    assert len(paths) == len(python_files())
    found = {str(path.relative_to(source)): unsafe_bytes(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "unsafe"),
    [
        ("import pickle", True),
        ("from cloudpickle import loads", True),
        ("frame.rdd.map(f)", True),
        ("from google.protobuf import json_format", True),
        ("eval(text)", True),
        ("model.eval(x)", False),
        ("import json", False),
    ],
)
def test_unsafe_bytes_are_recognised(source: str, unsafe: bool) -> None:
    assert bool(unsafe_bytes(source)) is unsafe


def test_generated_code_is_what_the_schema_gives() -> None:
    """`make proto` was run after the last change of a schema, and nobody edited its output."""
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "proto.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr


def test_the_lock_sets_no_options() -> None:
    offenders = [line for line in requirements() if line.lstrip().startswith("-")]
    must_be_empty(offenders, "option of pip in requirements.lock (index, find-links, trusted-host, include)")


def test_the_lock_names_no_address() -> None:
    must_be_empty(lines_matching(ADDRESS, (LOCK,)), "address or path in requirements.lock")


def test_the_lock_holds_only_names_versions_and_hashes() -> None:
    offenders = [line[:80] for line in requirements() if not PINNED.fullmatch(" ".join(line.split()))]
    must_be_empty(offenders, "neither name, version nor sha256 in requirements.lock")


def test_links_of_the_map_lead_somewhere() -> None:
    targets = re.findall(r"\[[^\]]*\]\(\s*<?([^)\s>]+)", text_of(MAP))
    offenders = [
        target
        for target in targets
        if not re.match(r"[a-z]+:|#", target)
        and not (MAP.parent / target.partition("#")[0].partition("::")[0]).exists()
    ]
    must_be_empty(offenders, "link in docs/map.md to a file that does not exist")


def test_tests_named_in_the_map_exist() -> None:
    references = re.findall(r"(tests/[\w./-]+\.py)((?:::\w+)+)", text_of(MAP))
    offenders = [f"{file}{names}" for file, names in references if not is_defined(ROOT / file, names.split("::")[1:])]
    must_be_empty(offenders, "test named in docs/map.md that does not exist")


def is_defined(path: Path, names: list[str]) -> bool:
    """Tell whether a file defines a test function, which may be a method: `names` leads to it from the outside in."""
    if not path.is_file():
        return False
    body: list[ast.stmt] = tree_of(path).body
    for name in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((each for each in body if isinstance(each, kinds) and each.name == name), None)
        if node is None:
            return False
        body = node.body
    return True
