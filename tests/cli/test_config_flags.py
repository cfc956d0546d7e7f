"""A config field is one thing seen four ways: dataclass field, flag, key of the file, line of the docs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from octavo.cli.config_docs import configuration_page
from octavo.cli.fields import config_fields, parse_size
from octavo.cli.flags import CONFIGS, SYNONYMS, read_config_file, with_config
from octavo.cli.main import app as octavo_app
from octavo.core.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError

CONFIGURATION_PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def parsed(*arguments: str, model: Any = "argument") -> tuple[EngineConfig, ServerConfig]:
    """The configs that a command line makes; SystemExit-free: a usage error raises AssertionError with its text."""
    seen: list[tuple[EngineConfig, ServerConfig]] = []
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    @with_config(model=model)
    def command(engine: EngineConfig, server: ServerConfig) -> None:
        seen.append((engine, server))

    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, (done.exit_code, done.output)
    return seen[0]


def other_value(config: type, name: str) -> tuple[list[str], Any]:
    """Command-line words that set a field to something else than its default, and the value they mean."""
    (field,) = (f for f in config_fields(config) if f.name == name)
    match field.kind:
        case "switch":
            return [f"--no-{field.flag[2:]}" if field.default else field.flag], not field.default
        case "choice":
            value = field.choices[-1]
            return [field.flag, value], value
        case "list":
            return [field.flag, "one", field.flag, "two"], ("one", "two")
        case "size":
            return [field.flag, "1GiB"], 1 << 30
        case "whole":
            value = int(field.low or 0) + 3
            return [field.flag, str(value)], value
        case "real":
            value = float(field.low or 0) + 0.5
            return [field.flag, str(value)], value
    return [field.flag, "some text"] if name != "model" else ["some text"], "some text"


ALL_FIELDS = [(config, f.name) for config in CONFIGS for f in fields(config)]


@pytest.mark.parametrize(("config", "name"), ALL_FIELDS, ids=[name for _, name in ALL_FIELDS])
def test_a_flag_sets_its_field_and_no_other(config: type, name: str) -> None:
    words, value = other_value(config, name)
    assert value != getattr(config(), name)
    expected = tuple(cls(**{name: value}) if cls is config else cls() for cls in CONFIGS)
    assert parsed(*words) == expected


def test_without_flags_every_field_has_its_default() -> None:
    assert parsed() == (EngineConfig(), ServerConfig())


def test_the_model_can_be_an_option_where_the_argument_is_something_else() -> None:
    assert parsed("--model", "m.gguf", model="option")[0].model == "m.gguf"


def test_synonyms_of_other_servers_mean_the_same() -> None:
    by_name = {field.name: field for config in CONFIGS for field in config_fields(config)}
    for name, synonyms in SYNONYMS.items():
        value = "1GiB" if by_name[name].kind == "size" else by_name[name].choices[-1]
        for synonym in synonyms:
            assert parsed(synonym, value) == parsed(by_name[name].flag, value)


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text('max_num_seqs = 8\nport = 9000\nkv_cache_memory = "1GiB"\napi_key = ["a", "b"]\naging_s = 3\n')
    engine, server = parsed("--config", str(file), "--max-num-seqs", "9")
    assert engine == EngineConfig(max_num_seqs=9, kv_cache_memory=1 << 30, aging_s=3.0)
    assert server == ServerConfig(port=9000, api_key=("a", "b"))
    assert parsed("--config", str(file), "--api-key", "c")[1].api_key == ("c",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_model_length = 5", "unknown key 'max_model_length'; did you mean 'max_model_len'?"),
        ("max-num-seqs = 5", "unknown key 'max-num-seqs'; did you mean 'max_num_seqs'?"),
        ("zzz = 5", "unknown key 'zzz'; the keys are model, "),
        ('max_num_seqs = "8"', "max_num_seqs is '8' but must be a whole number"),
        ("max_num_seqs = true", "max_num_seqs is True but must be a whole number"),
        ("max_num_seqs = 0", "max_num_seqs is 0 but must be from 1 to 4096"),
        ('policy = "lifo"', "policy is 'lifo' but must be one of fcfs, priority, fair"),
        ("enable_prefix_caching = 1", "enable_prefix_caching is 1 but must be true or false"),
        ('api_key = "k"', "api_key is 'k' but must be a list of strings"),
        ('kv_cache_memory = "2G"', "'2G' is not a size"),
        ("port 9", "is not TOML"),
    ],
)
def test_a_wrong_config_file_is_named_with_its_key_and_the_way_out(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config_file(file)
    assert str(caught.value).startswith(str(file))
    assert complaint in str(caught.value)


def test_a_config_file_that_is_not_there_is_one_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*nowhere\.toml: No such file"):
        read_config_file(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs is 0 but must be from 1 to 4096"),
        (["--port", "70000"], "port is 70000 but must be from 0 to 65535"),
        (["--target-itl-ms", "nan"], "target_itl_ms is nan but must be at least 1"),
        (["--policy", "lifo"], "'lifo'"),
        (["--kv-cache-memory", "2G"], "'2G' is not a size"),
        (["--max-model-length", "5"], "No such option: --max-model-length"),
    ],
)
def test_a_wrong_flag_is_a_usage_error_that_names_it(words: list[str], complaint: str) -> None:
    done = CliRunner().invoke(octavo_app, ["serve", *words])
    assert done.exit_code == 2
    assert words[0] in done.stderr
    assert complaint in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["serve", "chat", "complete", "doctor"])
def test_help_shows_every_field_with_its_unit_bounds_and_default_at_80_columns(command: str) -> None:
    done = CliRunner().invoke(octavo_app, [command, "--help"], terminal_width=80, env={"COLUMNS": "80"})
    text = " ".join(done.stdout.split())
    for field in config_fields(EngineConfig) + (config_fields(ServerConfig) if command == "serve" else []):
        if field.name != "model":
            assert field.flag in text
        assert field.doc in text
        assert f"default: {field.shown_default}]" in text
        assert field.bounds in text
    assert max(map(len, done.stdout.splitlines())) <= 80


@given(st.integers(min_value=0, max_value=1 << 20), st.sampled_from(["KiB", "MiB", "GiB", "kB", "MB", "GB"]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    power = "kmg".index(unit[0].lower()) + 1
    assert parse_size(f"{number}{unit}") == parse_size(f" {number} {unit.lower()} ") == number * base**power


@pytest.mark.parametrize("text", ["", "G", "2G", "2 gigs", "-1", "1.5", "1e9", "0x10", "²GiB"])
def test_what_is_not_a_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="not a"):
        parse_size(text)


def test_fractions_and_plain_bytes_are_sizes() -> None:
    assert (parse_size("1.5GiB"), parse_size("4096"), parse_size("7B")) == (3 << 29, 4096, 7)


def test_the_configuration_page_is_what_the_dataclasses_say() -> None:
    found = CONFIGURATION_PAGE.read_text(encoding="utf-8")
    assert found == configuration_page(), "run: python -m octavo.cli.config_docs > docs/configuration.md"
