#!/bin/sh
# Everything that needs a GPU, in one run of at most ten minutes that ends in one table.
#
#   sh ci/gpu.sh wheels   where there is a registry: puts the packages that the GPU's machine lacks into .wheels (git-ignored)
#   sh ci/gpu.sh          on the GPU's machine, which needs no network: its own Python 3.12, torch 2.11 and Triton 3.6, and .wheels
#
# Weights are random and made on the spot. Without a CUDA device it says so and ends with status 0. Each stage has a limit of its
# own, so that a stage that hangs costs its own time; what failed is named at the end, and the status is then 1.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WHEELS=.wheels
MOST=$((64 * 1024)) # KiB that may travel
LACKS="annotated-types cyclopts docstring-parser fastapi gguf httpcore2 httpx2 opentelemetry-api prometheus-client pydantic
 pydantic-core rich-rst sse-starlette starlette structlog truststore typing-inspection uvicorn"

fill() {
    mkdir -p "$WHEELS"
    for name in $LACKS; do
        pin=$(grep -x "$name==.*" ci/constraints.txt) || { echo "ci/gpu.sh: $name is not pinned in ci/constraints.txt" >&2; exit 1; }
        set -- "$WHEELS"/"$(printf '%s' "$name" | tr - _)"-"${pin#*==}"-*.whl
        [ -e "$1" ] && continue
        "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
            --dest "$WHEELS" "$pin" || exit 1
    done
    size=$(du -sk "$WHEELS" | cut -f1)
    [ "$size" -le "$MOST" ] || { echo "ci/gpu.sh: $WHEELS holds $size KiB, but at most $MOST may travel" >&2; exit 1; }
    echo "$WHEELS: $(ls "$WHEELS" | wc -l) wheels, $size KiB"
}

if [ "${1:-}" = wheels ]; then
    fill
    exit 0
elif [ -n "${1:-}" ]; then
    echo "ci/gpu.sh: '$1' is no command; there is 'wheels', and without one it runs" >&2
    exit 2
fi

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "ci/gpu.sh: no CUDA device, nothing was run ($("$PYTHON" --version 2>&1))"
    exit 0
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
# What the machine has stays as it is: only what cannot be found there is taken from the wheels.
if ls "$WHEELS"/*.whl >/dev/null 2>&1; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
fi
export PYTHONPATH="$PWD:$site" PYTHONUNBUFFERED=1 LOCKSTEP_PROFILE=dev
unset TRITON_INTERPRET

failed=
stage() {
    limit=$1
    shift
    printf '== %s\n' "$*"
    timeout --kill-after=10 "$limit" "$@" || failed="$failed
  '$*' ended with status $? (124: over its limit of $limit)"
}
stage 75 "$PYTHON" ci/triton_errors.py
stage 145 "$PYTHON" -m pytest -q -n 4 -m gpu tests/compute tests/sampling tests/triton properties/test_gpu.py
# What is slow in the interpreter is quick on a GPU, so the slow tests run there, too.
stage 75 "$PYTHON" -m pytest -q -n 8 -m "not gpu" tests/triton tests/conformance/test_hf_parity.py
# A short context, since every width of it is recorded, twice, before the first request.
stage 105 sh -c '"$0" ci/gpu_model.py "$1" && "$0" -m server graphbench --model "$1" --server=--device=cuda \
    --server=--max-model-len=256 --rates 16,64 --seconds 8' "$PYTHON" "$site/model"
stage 140 "$PYTHON" ci/gpu_table.py
[ -z "$failed" ] || { printf 'ci/gpu.sh: failed:%s\n' "$failed" >&2; exit 1; }
