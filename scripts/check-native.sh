#!/bin/sh
# Checks of the C++ sources: their formatting, and that no code compiled for one instruction set can end up elsewhere.
set -eu
# shellcheck disable=SC2046
.venv/bin/clang-format --dry-run --Werror $(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*/*.cpp' 'csrc/*/*.h')
.venv/bin/python csrc/check_symbols.py build
