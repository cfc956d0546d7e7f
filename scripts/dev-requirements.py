"""Print the development dependencies of pyproject.toml, one per line, for pips that predate dependency groups."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
print("\n".join(project["dependency-groups"]["dev"]))
