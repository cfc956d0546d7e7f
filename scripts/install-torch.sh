#!/bin/sh
# Install torch into $PYTHON's environment, preferring a CPU build: the default wheel on Linux x86-64 brings gigabytes of CUDA.
set -eu
: "${PYTHON:=python3}" "${TORCH:=auto}"
pip() { "$PYTHON" -m pip --disable-pip-version-check "$@"; }

if [ "$TORCH" = none ] || "$PYTHON" -c 'import torch' 2>/dev/null; then
    exit 0
fi
if [ "$TORCH" != auto ]; then
    exec "$PYTHON" -m pip --disable-pip-version-check install --quiet "$TORCH"
fi
# 2.13.0 first: an index or wheel folder that offers "2.13.0+cpu" answers it with the CPU build, which sorts above "2.13.0".
# On macOS and Windows the plain wheel is a CPU (or MPS) build anyway.
case "$(uname -s)" in
Linux)
    pip install --quiet torch==2.13.0+cpu 2>/dev/null ||
        pip install --quiet --index-url https://download.pytorch.org/whl/cpu "torch>=2.6" 2>/dev/null ||
        pip install --quiet "torch>=2.6"
    ;;
*) pip install --quiet "torch>=2.6" ;;
esac
