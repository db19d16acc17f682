"""Models from installed packages: only source whose hash is allowed is executed, and only from the bytes hashed."""

import builtins
import importlib
import marshal
import py_compile
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from echostore.kernel.errors import NotFound, Refused, UsageError
from echostore.peer.peer import Peer
from echostore.peer.plugins import InstalledModel, ModelRefused, entry_point_hashes
from two_peers import open_quiet

COUNTER = '''\
"""A counter."""
import builtins
builtins.__dict__.setdefault("executed", []).append("counter")

class Counter:
    """Counts."""
    name = "counter"
    version = 1

    def __init__(self):
        self.total = 0

    def apply(self, operation, stamp):
        self.total += operation

    def value(self):
        return self.total
'''

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution with one module and its entry points where Python finds it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def make(
        entries: dict[str, str], source: str = COUNTER, *, module: str = "temp_models/counter.py", dist: str = "temp"
    ) -> Path:
        path = site / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        if path.parent != site and path.name != "__init__.py":
            body = "import builtins\nbuiltins.__dict__.setdefault('executed', []).append('parent')\n"
            (path.parent / "__init__.py").write_text(body, encoding="utf-8")
        info = site / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n", encoding="utf-8")
        lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
        (info / "entry_points.txt").write_text(f"[echostore.models]\n{lines}", encoding="utf-8")
        importlib.invalidate_caches()
        return path

    return make


@pytest.fixture(autouse=True)
def executed() -> Iterator[list[str]]:
    """What the modules did when they were executed."""
    log: list[str] = []
    vars(builtins)["executed"] = log
    yield log
    del vars(builtins)["executed"]
    for name in [name for name in sys.modules if name.startswith(("_echostore_model_", "temp_models"))]:
        del sys.modules[name]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with open_quiet(tmp_path / "laptop") as opened:
        yield opened


def hash_of(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def test_what_is_installed_is_listed_with_hashes_and_not_imported(install: Install, executed: list[str]) -> None:
    path = install({"counter@1": "temp_models.counter:Counter"})
    assert entry_point_hashes() == [
        InstalledModel("counter@1", "temp", "temp_models.counter:Counter", str(path), hash_of(path))
    ]
    assert executed == []


def test_an_allowed_model_is_loaded_and_works(install: Install, peer: Peer, executed: list[str]) -> None:
    path = install({"counter@1": "temp_models.counter:Counter"})
    loaded = peer.load_models({"counter@1": hash_of(path).upper()})
    assert [model.__name__ for model in loaded.models] == ["Counter"]
    assert loaded.refused == ()
    assert executed == ["counter"]  # and not the package above it
    party = peer.create_party("x")
    counter = party.create("counter")
    counter.apply(2)
    counter.apply(3)
    assert counter.value() == 5
    assert party.create(loaded.models[0], type="tally").type == "tally"


def test_loading_again_gives_the_same_class_and_executes_nothing(
    install: Install, peer: Peer, executed: list[str]
) -> None:
    allow = {"counter@1": hash_of(install({"counter@1": "temp_models.counter:Counter"}))}
    assert peer.load_models(allow).models == peer.load_models(allow).models
    assert executed == ["counter"]


def test_what_is_not_allowed_is_left_alone_and_named_with_its_hash(
    install: Install, peer: Peer, executed: list[str]
) -> None:
    path = install({"counter@1": "temp_models.counter:Counter"})
    loaded = peer.load_models({})
    assert loaded.models == ()
    (refused,) = loaded.refused
    assert isinstance(refused, Refused)
    assert (refused.name, refused.sha256) == ("counter@1", hash_of(path))
    assert hash_of(path) in str(refused)
    assert executed == []
    assert not peer.models.known("counter", 1)


def test_a_tampered_file_is_refused_and_never_executed(install: Install, peer: Peer, executed: list[str]) -> None:
    path = install({"counter@1": "temp_models.counter:Counter"})
    allowed = hash_of(path)
    path.write_text(COUNTER + "\nexecuted.append('tampered')\n", encoding="utf-8")
    with pytest.raises(ModelRefused, match=hash_of(path)) as refused:
        peer.load_models({"counter@1": allowed})
    assert refused.value.sha256 == hash_of(path)
    assert allowed in str(refused.value)
    assert executed == []
    assert not peer.models.known("counter", 1)


def test_a_compiled_file_beside_the_source_is_not_looked_at(install: Install, peer: Peer, executed: list[str]) -> None:
    """The attack: leave the source as it was allowed, and put other code into the cache that imports would use."""
    path = install({"counter@1": "temp_models.counter:Counter"})
    allowed = hash_of(path)
    cached = Path(py_compile.compile(str(path)) or "")
    poison = compile("executed.append('poison')", str(path), "exec")
    cached.write_bytes(cached.read_bytes()[:16] + marshal.dumps(poison))
    peer.load_models({"counter@1": allowed})
    assert executed == ["counter"]
    importlib.import_module("temp_models.counter")
    assert executed == ["counter", "parent", "poison"]  # an ordinary import falls for it


def test_one_refusal_refuses_all_and_executes_none(install: Install, peer: Peer, executed: list[str]) -> None:
    good = install({"counter@1": "temp_models.counter:Counter"})
    install({"other@1": "temp_models.other:Other"}, "x = 1", module="temp_models/other.py", dist="second")
    with pytest.raises(ModelRefused, match="other@1"):
        peer.load_models({"counter@1": hash_of(good), "other@1": "0" * 64})
    assert executed == []
    assert not peer.models.known("counter", 1)


def test_a_name_that_nobody_offers_is_not_found(install: Install, peer: Peer) -> None:
    path = install({"counter@1": "temp_models.counter:Counter"})
    with pytest.raises(NotFound, match=r"counter@2.*Installed models: counter@1"):
        peer.load_models({"counter@2": hash_of(path)})


@pytest.mark.parametrize(
    ("entry", "source", "problem"),
    [
        ("temp_models.counter:Counter", COUNTER.replace("version = 1", "version = 3"), "calls itself counter@3"),
        ("temp_models.counter:Counter", COUNTER.replace("def value", "def result"), "has no method 'value'"),
        ("temp_models.counter:Missing", COUNTER, "AttributeError"),
        ("temp_models.counter:thing", COUNTER + "\nthing = 5\n", "is no class but 5"),
        ("temp_models.counter", COUNTER, "is no class"),
        ("temp_models.counter:Counter", "raise OSError('no')", "OSError: no"),
        ("temp_models.counter:Counter", "def (", "SyntaxError"),
        ("temp_models.counter:Counter", "from . import sibling", "ImportError"),
    ],
)
def test_something_else_than_the_promised_model_is_refused(
    install: Install, peer: Peer, entry: str, source: str, problem: str
) -> None:
    path = install({"counter@1": entry}, source)
    with pytest.raises(ModelRefused, match=problem):
        peer.load_models({"counter@1": hash_of(path)})
    assert not peer.models.known("counter", 1)


def test_a_model_without_a_source_file_is_refused(install: Install, peer: Peer) -> None:
    install({"clock@1": "time:Clock", "gone@1": "temp_models.gone:Gone"})
    assert [offer.sha256 for offer in entry_point_hashes()] == ["", ""]
    for name in ("clock@1", "gone@1"):
        with pytest.raises(ModelRefused, match="no source file"):
            peer.load_models({name: "0" * 64})


def test_a_base_model_can_not_be_replaced(install: Install, peer: Peer) -> None:
    source = COUNTER.replace('name = "counter"', 'name = "property-set"')
    path = install({"property-set@1": "temp_models.counter:Counter"}, source)
    with pytest.raises(UsageError, match="registered already"):
        peer.load_models({"property-set@1": hash_of(path)})


def test_a_hash_must_be_one(peer: Peer) -> None:
    with pytest.raises(UsageError, match="not a SHA-256"):
        peer.load_models({"counter@1": "any"})


def test_a_package_that_is_itself_the_module_is_found(install: Install, peer: Peer) -> None:
    path = install({"counter@1": "temp_models:Counter"}, module="temp_models/__init__.py")
    assert peer.load_models({"counter@1": hash_of(path)}).models


def test_a_loaded_model_can_be_published_under_its_hash(install: Install, peer: Peer) -> None:
    path = install({"counter@1": "temp_models.counter:Counter"})
    (model,) = peer.load_models({"counter@1": hash_of(path)}).models
    published = peer.create_party("x").publish_model(model)
    assert (published.name, published.version, published.description) == ("counter", 1, "Counts.")
    assert published.sha256 == hash_of(path)


def test_what_a_party_publishes_loads_nothing(install: Install, peer: Peer, executed: list[str]) -> None:
    """A published descriptor is information; a member still allows by hand."""
    path = install({"counter@1": "temp_models.counter:Counter"})
    party = peer.create_party("x")
    (model,) = peer.load_models({"counter@1": hash_of(path)}).models
    party.publish_model(model)
    executed.clear()
    assert [each.name for each in party.published_models()] == ["counter"]
    assert executed == []
