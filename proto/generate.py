"""Generate ``extproc/wire/`` from the .proto files in this folder.

    python proto/generate.py            write the modules and their stubs
    python proto/generate.py --check    change nothing; exit 1 when they aren't what the .proto files say

The files lie under ``proto/extproc/wire/`` so that protoc's import paths are the package's own: what it
writes imports ``extproc.wire.base_pb2`` and needs no rewriting. No ``*_pb2_grpc.py`` is made: the server
registers a generic handler, because it wants the messages as bytes.

protoc comes from grpcio-tools, whose version requirements.lock pins; another version may write other bytes.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.resources
import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

PROTO = Path(__file__).resolve().parent
ROOT = PROTO.parent
WIRE = Path("extproc", "wire")
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(target: Path) -> list[str]:
    """Write the modules for every .proto file below ``target`` and return their names, sorted."""
    sources = sorted(path.relative_to(PROTO).as_posix() for path in (PROTO / WIRE).glob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    target.mkdir(parents=True, exist_ok=True)
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTO}",
            f"--proto_path={well_known}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}; its messages are above")
    return generated_files(target)


def generated_files(root: Path) -> list[str]:
    """Names of the generated files in ``root``'s wire package, sorted."""
    return sorted(path.name for pattern in GENERATED for path in (root / WIRE).glob(pattern))


def differences(expected: Path, actual: Path) -> list[str]:
    """One line for each generated file of ``actual`` that isn't as in ``expected``; empty when all agree."""
    wanted, found = set(generated_files(expected)), set(generated_files(actual))
    lines = [f"{WIRE / name}: missing" for name in sorted(wanted - found)]
    lines += [f"{WIRE / name}: no .proto file makes it" for name in sorted(found - wanted)]
    lines += [
        f"{WIRE / name}: not what the .proto file says"
        for name in sorted(wanted & found)
        if not filecmp.cmp(expected / WIRE / name, actual / WIRE / name, shallow=False)
    ]
    return lines


def main(arguments: list[str] | None = None, *, root: Path = ROOT) -> int:
    """Command line; ``root`` is where ``extproc/wire/`` lies. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate extproc/wire/ from proto/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on a difference")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        names = generate(fresh)
        if options.check:
            problems = differences(fresh, root)
            for line in problems:
                print(line, file=sys.stderr)
            if problems:
                print("Run `make proto` and commit what it writes.", file=sys.stderr)
            return 1 if problems else 0
        for name in set(generated_files(root)) - set(names):
            (root / WIRE / name).unlink()
        (root / WIRE).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(fresh / WIRE / name, root / WIRE / name)
    print(f"{root / WIRE}: {len(names)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
