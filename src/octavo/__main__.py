"""``python -m octavo``."""

from octavo.cli.main import main

main()
