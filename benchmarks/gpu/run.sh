#!/usr/bin/env bash
# run.sh [WHEELS]: runs benchmarks.gpu.all on a machine with a GPU and no network; what it writes is in $OUT.
#
# Make the folder of wheels where there is a network, for the machine's Python, and carry it there:
#   pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     --platform manylinux2014_x86_64 --dest wheels pydantic pydantic-core annotated-types typing-inspection \
#     jsonargparse typeshed-client docstring-parser importlib-resources greenlet
#
# As a call of the device tool, with its limit of ten minutes:
#   command: bash benchmarks/gpu/run.sh wheels      carry: wheels      timeout_s: 600
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
wheels=${1:-wheels}
if [ -d "$wheels" ]; then
  python -m pip install --quiet --no-index --no-deps "$wheels"/*.whl
fi
export PYTHONPATH=$PWD
# What the package needs, at once rather than in each rank.
python -c "import lightning_pipeshift, transformers, pytest, xdist"
timeout 575 python -m benchmarks.gpu.all --limit 540 --json "${OUT:-.}/gpu.json"
