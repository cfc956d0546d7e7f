"""Models from a hub, against a small hub on loopback: what is fetched, what is kept, and what goes wrong how."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub.hub_server import HubRepo, HubServer
from octavo.core.errors import DownloadError, ModelFileError
from octavo.hub.resolve import list_models, remove_model, resolve_model

CHUNK = 10 << 20  # what the hub library writes at a time
SHARDS = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 5000 for i in (1, 2)}
INDEX = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}'}
EXTRAS = {"README.md": b"# hello", "pytorch_model.bin": b"\x80\x04pickle", "onnx/model.onnx": b"x"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))  # no token of the machine's user
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library waits a second before it resumes
        yield server


def fetch(name: str, **keywords: object) -> Path:
    return resolve_model(name, progress=False, **keywords).path  # type: ignore[arg-type]


def test_a_single_file_model_is_fetched_with_what_it_needs_and_nothing_else(hub: HubServer) -> None:
    weights = bytes(range(256)) * 400
    hub.repos["org/name"] = HubRepo({**SMALL, **EXTRAS, "model.safetensors": weights, "model-old.safetensors": b"x"})
    resolved = resolve_model("org/name", progress=False)
    assert (resolved.name, resolved.source) == ("org/name", "hub")
    assert {path.name: path.read_bytes() for path in resolved.path.iterdir()} == {**SMALL, "model.safetensors": weights}
    assert hub.downloads()[-1] == "model.safetensors"  # last: a folder that has the weights has everything


def test_a_sharded_model_is_fetched_shard_by_shard(hub: HubServer) -> None:
    index = {"model.safetensors.index.json": INDEX.encode()}
    hub.repos["org/name"] = HubRepo({**SMALL, **SHARDS, **index, **EXTRAS, "stray.safetensors": b"x"})
    folder = fetch("org/name")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {**SMALL, **SHARDS, **index}


def test_what_the_cache_holds_is_used_without_asking_the_hub(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": b"w"})
    first = fetch("org/name")
    hub.requests.clear()
    assert fetch("org/name") == fetch("org/name", offline=True) == first
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("org/name") == fetch("org/name", refresh=True) == first
    assert fetch("org/name", revision=hub.repos["org/name"].commit) == first
    assert hub.requests == []


def test_a_commit_that_was_asked_for_by_name_stays_when_the_branch_moves(hub: HubServer) -> None:
    repo = hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": b"w"})
    pinned = repo.commit
    folder = fetch("org/name", revision=pinned)
    repo.files["config.json"] += b" "
    assert fetch("org/name") != folder
    assert fetch("org/name", revision=pinned, offline=True) == folder


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_refresh_follows_the_branch_and_fetches_only_what_changed(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError("no links here")))
    weights = {"model.safetensors": b"w" * 9000}
    hub.repos["org/name"] = HubRepo({**SMALL, **weights})
    first = fetch("org/name")
    hub.repos["org/name"] = HubRepo({**SMALL, **weights, "config.json": b'{"model_type": "llama", "new": 1}'})
    assert fetch("org/name") == first
    hub.requests.clear()
    second = fetch("org/name", refresh=True)
    assert second != first
    assert hub.downloads() == ["config.json"]
    assert (second / "model.safetensors").read_bytes() == weights["model.safetensors"]
    assert (second / "config.json").read_bytes() == b'{"model_type": "llama", "new": 1}'
    assert not first.exists()
    assert list((second.parent / "partial").iterdir()) == []


def test_one_gguf_file_is_chosen_by_name_by_quantisation_or_for_being_the_only_one(hub: HubServer) -> None:
    files = {f"tiny-{q}.gguf": q.encode() for q in ("Q4_0", "Q4_0_4_4", "Q8_0")}
    split = {"tiny-F32-00001-of-00002.gguf": b"x"}
    hub.repos["org/many"] = HubRepo({**files, **split, "README.md": b""})
    assert fetch("org/many:Q4_0").read_bytes() == b"Q4_0"
    assert fetch("org/many:q8_0").name == "tiny-Q8_0.gguf"
    assert fetch("org/many:tiny-Q4_0_4_4.gguf").read_bytes() == b"Q4_0_4_4"
    hub.repos["org/one"] = HubRepo({"sub/only.gguf": b"1", "config.json": b"{}"})
    assert fetch("org/one").as_posix().endswith("sub/only.gguf")
    hub.repos["org/two"] = HubRepo(files)
    with pytest.raises(
        ModelFileError, match=r"3 GGUF files that fit no further name; write org/two:FILE with one of tiny"
    ):
        fetch("org/two")
    with pytest.raises(ModelFileError, match="0 GGUF files that fit F16"):
        fetch("org/two:F16")


def test_repositories_without_readable_weights_are_refused_with_the_reason(hub: HubServer) -> None:
    hub.repos["org/pickle"] = HubRepo({**SMALL, "pytorch_model.bin": b"\x80"})
    with pytest.raises(ModelFileError, match="only as pickles, which can run code"):
        fetch("org/pickle")
    hub.repos["org/data"] = HubRepo({"README.md": b""})
    with pytest.raises(ModelFileError, match="neither safetensors nor GGUF files at main"):
        fetch("org/data")
    hub.repos["org/plain"] = HubRepo({**SMALL, "model.safetensors": b"w"})
    with pytest.raises(ModelFileError, match="has no GGUF files, so 'Q4_0' means nothing"):
        fetch("org/plain:Q4_0")
    assert "model.safetensors" not in hub.downloads()


def test_a_connection_that_is_cut_goes_on_where_it_stopped(hub: HubServer) -> None:
    weights = os.urandom(1 << 20) * 10 + b"tail"
    hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": weights})
    hub.repos["org/name"].cut_after["model.safetensors"] = [CHUNK + 2]
    assert (fetch("org/name") / "model.safetensors").read_bytes() == weights
    ranges = [seen.range for seen in hub.requests if seen.method == "GET" and seen.path.endswith("model.safetensors")]
    assert ranges == [None, f"bytes={CHUNK}-"]


def test_the_next_process_goes_on_where_an_interrupted_one_stopped(hub: HubServer, cache: Path) -> None:
    weights = os.urandom(1 << 20) * 10 + b"tail"
    repo = hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": weights})
    repo.cut_after["model.safetensors"] = [CHUNK + 2] + [0] * 20
    with pytest.raises(DownloadError, match="what has arrived is kept"):
        fetch("org/name")
    repo.cut_after.clear()
    hub.requests.clear()
    assert not (cache / "hub" / "org--name" / "refs").exists()
    assert (fetch("org/name") / "model.safetensors").read_bytes() == weights
    assert [seen.range for seen in hub.requests if seen.method == "GET" and "/resolve/" in seen.path] == [
        f"bytes={CHUNK}-"
    ]
    assert list((cache / "hub" / "org--name" / "partial").iterdir()) == []


def test_a_file_whose_hash_is_wrong_is_thrown_away(hub: HubServer, cache: Path) -> None:
    repo = hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": b"w" * 999})
    for name in ("model.safetensors", "config.json"):
        repo.corrupt = frozenset({name})
        with pytest.raises(DownloadError, match=f"{name} of org/name arrived damaged"):
            fetch("org/name")
        remaining = [path for path in cache.rglob("*") if path.is_file() and path.name == name]
        assert remaining == []
        with pytest.raises(DownloadError, match="not in the cache and octavo is offline"):
            fetch("org/name", offline=True)
        for path in cache.rglob("*.json"):
            path.unlink()


def test_tokens_open_private_and_gated_repositories(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**SMALL, "model.safetensors": b"w"}
    hub.repos["org/private"] = HubRepo(files, token="secret")
    hub.repos["org/gated"] = HubRepo(files, token="secret", gated=True)
    with pytest.raises(DownloadError, match="has no model org/private, or it is private and HF_TOKEN does not open it"):
        fetch("org/private")
    with pytest.raises(DownloadError, match="org/gated is gated; ask for access at http"):
        fetch("org/gated")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(DownloadError, match="org/gated is gated"):
        fetch("org/gated")
    monkeypatch.setenv("HF_TOKEN", "secret")
    for name in ("org/private", "org/gated"):
        assert (fetch(name) / "model.safetensors").read_bytes() == b"w"
    assert hub.requests[-1].authorization == "Bearer secret"


def test_what_does_not_exist_is_said_to_be_missing(hub: HubServer) -> None:
    hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": b"w"})
    with pytest.raises(DownloadError, match="has no model org/other"):
        fetch("org/other")
    with pytest.raises(DownloadError, match="org/name has no revision 'v2'"):
        fetch("org/name", revision="v2")
    assert list_models() == []
    assert fetch("org/name", revision=hub.repos["org/name"].commit).is_dir()


def test_without_a_network_the_error_says_what_could_not_be_reached(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(
        DownloadError, match=r"cannot fetch org/name from http://127.0.0.1:9: .*; check the network and try again"
    ):
        fetch("org/name")
    with pytest.raises(DownloadError, match="not in the cache and octavo is offline; run 'octavo pull'"):
        fetch("org/name", offline=True)
    with pytest.raises(DownloadError, match="smollm2-135m is not in the cache and octavo is offline"):
        fetch("smollm2-135m", offline=True)


@pytest.mark.parametrize(
    "bad",
    [
        "../../evil.safetensors",
        "/abs.safetensors",
        "..",
        "a/../../b.gguf",
        "con\nfig.gguf",
        "a//b.gguf",
        "a\\..\\b.gguf",
    ],
)
def test_file_names_that_lead_out_of_the_cache_are_refused(hub: HubServer, cache: Path, bad: str) -> None:
    if bad.endswith(".gguf"):
        hub.repos["org/name"] = HubRepo({bad: b"x"})
    else:
        index = json.dumps({"weight_map": {"a": bad}}).encode()
        hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors.index.json": index, bad: b"x"})
    with pytest.raises(ModelFileError, match=r"not a name octavo writes to disk|not a safetensors file"):
        fetch("org/name")
    outside = [path for path in cache.parent.rglob("*") if path.is_file() and cache not in path.parents]
    assert outside == []


@pytest.mark.parametrize(
    "name", ["org/..", "../org", "org/a--b", "org/.hidden", "org/name:../x", "a/b/c", "org", "", "a\0b"]
)
def test_names_that_cannot_be_models_are_refused(cache: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=r"is not a possible|is neither a file|is not the name"):
        fetch(name)
    with pytest.raises(ModelFileError, match="is not a possible revision"):
        fetch("org/name", revision="../../x")
    assert not cache.exists()


def test_paths_win_over_hub_ids_and_unknown_names_list_the_aliases(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert (resolve_model("org/name").source, resolve_model("org/name").name) == ("path", "name")
    assert resolve_model("m.gguf").name == "m"
    with pytest.raises(ModelFileError, match="is on disk and has no revision 'v1'"):
        resolve_model("m.gguf", revision="v1")
    with pytest.raises(ModelFileError, match="comes from a package and has no revision 'v1'"):
        resolve_model("smollm2-135m", revision="v1")
    with pytest.raises(ModelFileError, match=r"nor one of smollm2-135m, smollm2-360m, smollm2-1.7b, tinyllama"):
        fetch("gone.gguf")
    with pytest.raises(ModelFileError, match="neither a file or folder here"):
        fetch("./org/gone")


def test_an_alias_stands_for_a_hub_id(hub: HubServer) -> None:
    hub.repos["TinyLlama/TinyLlama-1.1B-Chat-v1.0"] = HubRepo({**SMALL, "model.safetensors": b"w"})
    resolved = resolve_model("tinyllama", progress=False)
    assert (resolved.name, resolved.source) == ("tinyllama", "hub")
    assert [model.name for model in list_models()] == ["TinyLlama/TinyLlama-1.1B-Chat-v1.0"]
    remove_model("tinyllama")
    assert list_models() == []


def test_models_are_listed_with_their_size_and_removed_by_name(hub: HubServer, cache: Path) -> None:
    assert list_models() == []
    hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": b"w" * 5000})
    fetch("org/name")
    hub.repos["org/name"].files["config.json"] += b" "
    fetch("org/name", refresh=True)  # hard links count once
    packaged = cache / "packages" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    packaged.parent.mkdir()
    packaged.write_bytes(b"GGUF" * 10)
    (cache / "packages" / "notes.txt").write_text("not a model")
    models = {model.name: model for model in list_models()}
    assert set(models) == {"org/name", "smollm2-135m"}
    assert models["smollm2-135m"].num_bytes == 40
    small = sum(map(len, SMALL.values())) + 1
    assert models["org/name"].num_bytes == 5000 + small + 40  # and the commit that the branch stands for
    with pytest.raises(ModelFileError, match=r"holds no model 'org/other'; it holds org/name, smollm2-135m"):
        remove_model("org/other")
    assert remove_model("smollm2-135m") == 40
    assert remove_model("org/name") == 5000 + small + 40
    assert list_models() == []
    assert (cache / "packages" / "notes.txt").exists()


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_nothing_outside_the_cache_is_listed_or_removed(cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "weights.gguf").write_bytes(b"GGUF")
    for folder in ("hub", "packages"):
        (cache / folder).mkdir(parents=True)
    (cache / "hub" / "org--name").symlink_to(outside)
    (cache / "packages" / "weights.gguf").symlink_to(outside / "weights.gguf")
    assert list_models() == []
    for name in ("org/name", "weights", "../precious", str(outside)):
        with pytest.raises(ModelFileError, match="holds no model"):
            remove_model(name)
    (cache / "hub" / "org--name").unlink()
    (cache / "hub" / "org--name").mkdir()
    (cache / "hub" / "org--name" / "link").symlink_to(outside)
    (cache / "hub" / "org--name" / "own").write_bytes(b"own")
    assert remove_model("org/name") == 3
    assert (outside / "weights.gguf").exists()
    (cache / "hub").rmdir()
    (cache / "hub").symlink_to(outside)
    (outside / "org--name").mkdir()
    (outside / "org--name" / "weights").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="outside the model cache"):
        remove_model("org/name")


@pytest.mark.skipif(os.name == "nt", reason="Windows has its own folder")
def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from octavo.hub.cache import cache_root

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "a"))
    assert cache_root() == tmp_path / "a"
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_root() == tmp_path / "b" / "octavo"
    monkeypatch.setenv("HOME", str(tmp_path))
    for odd in ("relative/path", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", odd)
        assert cache_root().relative_to(tmp_path).parts in ((".cache", "octavo"), ("Library", "Caches", "octavo"))


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    for name in ("org/name", "smollm2-135m"):
        with pytest.raises(DownloadError, match=r"cannot write to the model cache .*; set OCTAVO_CACHE"):
            fetch(name)


@pytest.mark.slow
def test_two_processes_that_want_the_same_model_both_get_it(hub: HubServer, cache: Path) -> None:
    hub.repos["org/name"] = HubRepo({**SMALL, "model.safetensors": os.urandom(3_000_000)})
    program = "from octavo.hub.resolve import resolve_model; print(resolve_model('org/name', progress=False).path)"
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1]
    assert (Path(outputs[0]) / "model.safetensors").read_bytes() == hub.repos["org/name"].files["model.safetensors"]
    assert hub.downloads().count("model.safetensors") == 1
