"""Generate src/echostore/wire/generated from src/echostore/wire/schema (make proto, make proto-check).

The schema directory is the import root: a schema file imports its neighbour as `import "neighbour.proto";`.
protoc then writes absolute imports (`import neighbour_pb2`), which this script turns into imports relative to
the generated package. Output depends on the schema and the locked versions of protoc and mypy-protobuf only.
"""

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "src/echostore/wire/schema"
GENERATED = ROOT / "src/echostore/wire/generated"
PATTERNS = ("*_pb2.py", "*_pb2.pyi")


def generate(target: Path) -> None:
    """Write the modules and stubs of every schema file to `target`, which is empty."""
    sources = sorted(path.name for path in SCHEMA.glob("*.proto"))
    if not sources:
        sys.exit(f"proto: no .proto files in {SCHEMA.relative_to(ROOT)}")
    plugin = Path(sys.executable).parent / "protoc-gen-mypy"
    arguments = [
        "protoc",
        f"--plugin=protoc-gen-mypy={plugin}",
        f"--proto_path={SCHEMA}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--mypy_out=quiet:{target}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        sys.exit("proto: protoc failed, see above")
    for path in sorted(target.iterdir()):
        path.write_text(relative_imports(path.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")


def relative_imports(text: str) -> str:
    """Turn imports of sibling generated modules into imports from the package they live in."""
    text = re.sub(r"^import (\w+_pb2) as ", r"from . import \1 as ", text, flags=re.MULTILINE)
    text = re.sub(r"^import (\w+_pb2)$", r"from . import \1", text, flags=re.MULTILINE)
    return re.sub(r"^from (\w+_pb2) import ", r"from .\1 import ", text, flags=re.MULTILINE)


def read(folder: Path) -> dict[str, bytes]:
    """Return the generated files of `folder` by name."""
    return {path.name: path.read_bytes() for pattern in PATTERNS for path in folder.glob(pattern)}


def main() -> None:
    """Write the generated files, or with --check only compare them."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = read(Path(scratch))
    present = read(GENERATED)
    differing = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if "--check" in sys.argv[1:]:
        if differing:
            sys.exit(f"proto-check: out of date, run `make proto`: {', '.join(differing)}")
        print(f"proto-check: {len(fresh)} files match the schema")
        return
    GENERATED.mkdir(parents=True, exist_ok=True)
    for name in differing:
        if name in fresh:
            (GENERATED / name).write_bytes(fresh[name])
        else:
            (GENERATED / name).unlink()
    print(f"proto: {len(fresh)} files, {len(differing)} changed")


if __name__ == "__main__":
    main()
