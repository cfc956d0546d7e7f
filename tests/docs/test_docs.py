from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`(octavo(?:\.\w+)+)`", (ROOT / "docs/life-of-a-request.md").read_text())))


def resolve(dotted: str) -> object:
    """The module attribute that a dotted name stands for."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{dotted} is no module")


@pytest.mark.parametrize("name", NAMES)
def test_every_name_in_life_of_a_request_exists(name: str) -> None:
    assert resolve(name) is not None


def test_the_walk_names_many_places() -> None:
    assert len(NAMES) > 25


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_every_file_that_extending_names_is_there() -> None:
    named = set(re.findall(r"`((?:src|tests|csrc|scripts)/[\w/.]+\.\w+)`", (ROOT / "docs/extending.md").read_text()))
    assert len(named) > 25
    missing = [path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()]
    assert missing == []
