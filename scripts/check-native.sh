#!/bin/sh
# Checks of the C++ sources: formatting.
set -eu
files=$(git ls-files 'csrc/*.cpp' 'csrc/*.h')
if [ -n "$files" ]; then
    # shellcheck disable=SC2086
    .venv/bin/clang-format --dry-run --Werror $files
fi
