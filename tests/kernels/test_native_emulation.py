"""The AVX-512 and AMX kernels on a host that has neither: the same sources against emulated instructions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("ops", "attention", "packing", "invariance", "sampling", "safety")
#: An editable install puts its own finder before PYTHONPATH.
FORGET_INSTALLED = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__]; "
can_build = importlib.util.find_spec("nanobind") and shutil.which("cmake") and shutil.which("c++")


@pytest.mark.slow
@pytest.mark.skipif(not can_build, reason="needs nanobind, cmake and a C++ compiler")
def test_avx512_and_amx_sources_pass_every_native_test_in_emulation(tmp_path: Path) -> None:
    """Among those tests: all kernel tables agree bit for bit. Intrinsics are modelled in csrc/emulation/."""
    package, build = tmp_path / "package" / "octavo", tmp_path / "build"
    shutil.copytree(ROOT / "src" / "octavo", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    configure = ["cmake", "-S", ROOT, "-B", build, "-DOCTAVO_EMULATE=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*configure, f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package}"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "--parallel", "2"], check=True, capture_output=True)
    env = os.environ | {"PYTHONPATH": str(package.parent)}
    listed = FORGET_INSTALLED + "from octavo import _native; print(*_native.available_isas())"
    isas = subprocess.run([sys.executable, "-c", listed], env=env, check=True, capture_output=True, text=True).stdout
    assert {"avx512-emulated", "amx-emulated"} <= set(isas.split())
    files = [str(ROOT / "tests" / "kernels" / f"test_native_{name}.py") for name in FILES]
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            FORGET_INSTALLED + "import pytest; sys.exit(pytest.main(sys.argv[1:]))",
            "-q",
            "-m",
            "not slow",
            *files,
        ],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    symbols = subprocess.run(
        [sys.executable, ROOT / "csrc" / "check_symbols.py", build], capture_output=True, text=True
    )
    assert symbols.returncode == 0, symbols.stdout
