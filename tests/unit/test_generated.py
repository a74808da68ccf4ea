"""`extproc/wire/` is what the .proto files say, and `proto/generate.py --check` can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTO, WIRE = Path("proto"), Path("extproc/wire")


def generate(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(root / PROTO / "generate.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The .proto files and what is generated from them, elsewhere, to be spoiled."""
    for path in [PROTO / "generate.py", *(ROOT / PROTO).rglob("*.proto"), *(ROOT / WIRE).glob("*_pb2.py*")]:
        target = tmp_path / (path.relative_to(ROOT) if path.is_absolute() else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / path).read_bytes())
    return tmp_path


def test_the_generated_code_is_up_to_date() -> None:
    result = generate(ROOT, "--check")
    assert result.returncode == 0, result.stderr


def test_generating_writes_exactly_what_is_committed(copy: Path) -> None:
    committed = {path.name: path.read_bytes() for path in (copy / WIRE).iterdir()}
    for name in committed:
        (copy / WIRE / name).unlink()
    (copy / WIRE / "retired_pb2.py").write_text("")
    assert generate(copy).returncode == 0
    assert {path.name: path.read_bytes() for path in (copy / WIRE).iterdir()} == committed


def test_check_names_a_module_whose_proto_changed(copy: Path) -> None:
    proto = copy / PROTO / WIRE / "external_processor.proto"
    text = proto.read_text()
    assert "bool observability_mode = 10;" in text
    proto.write_text(text.replace("bool observability_mode = 10;", "bool observability_mode = 12;"))
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert "extproc/wire/external_processor_pb2.py: not what the .proto file says" in result.stderr
    assert "make proto" in result.stderr


def test_check_names_missing_and_surplus_modules(copy: Path) -> None:
    (copy / WIRE / "base_pb2.py").unlink()
    (copy / WIRE / "retired_pb2.py").write_text("")
    result = generate(copy, "--check")
    assert result.returncode == 1
    assert "extproc/wire/base_pb2.py: missing" in result.stderr
    assert "extproc/wire/retired_pb2.py: no .proto file makes it" in result.stderr
    assert not (copy / WIRE / "base_pb2.py").exists()
