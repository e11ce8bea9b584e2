#!/usr/bin/env bash
# All of megacore that one GPU can run, in under 8 minutes and without a network: builds the extension with CUDA, runs the
# tests marked gpu and every operator's benchmark, and writes one JSON with results, rows, machine and versions.
#
#   bench/gpu_check.sh [FILE]         FILE: default $OUT/gpu_check.json, without OUT ./gpu_check.json
#   bench/gpu_check.sh --cpu [FILE]   the same flow on the CPU with small shapes; builds nothing: does the script work?
#
# PYTHON (default python3) holds torch; MEGACORE_COMMIT names the commit where there is no git; PARTS="build tests
# bench-dropout" runs those alone. Each part has its own limit of seconds: one that fails or hangs loses only itself.
# FILE is written anew after each part.
set -uo pipefail
cd "$(dirname "$0")/.."

device=cuda
slack=1
if [ "${1:-}" = --cpu ]; then
    device=cpu
    shift
    slack=3 # a dry run shares its cores with whatever else runs
fi
file=${1:-${OUT:-.}/gpu_check.json}
python=${PYTHON:-python3}
total=470 # seconds; what is left of them bounds each part
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
export PYTHONUNBUFFERED=1 MAX_JOBS="${MAX_JOBS:-12}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

part() { # NAME SECONDS COMMAND...: its output to NAME.log, its exit status (124: too long) and seconds to NAME.rc
    local name=$1 limit=$2 start=$SECONDS rc
    shift 2
    if [ -n "${PARTS:-}" ] && [[ " $PARTS " != *" $name "* ]]; then
        return 0
    fi
    limit=$((limit * slack))
    if [ $((total - SECONDS)) -lt "$limit" ]; then
        limit=$((total - SECONDS))
    fi
    if [ "$limit" -le 0 ]; then
        echo "124 0" >"$parts/$name.rc"
        echo "gpu_check: no time left" >"$parts/$name.log"
        return 124
    fi
    timeout -k 5 "$limit" "$@" >"$parts/$name.log" 2>&1
    rc=$?
    echo "$rc $((SECONDS - start))" >"$parts/$name.rc"
    echo "gpu_check: $name: exit status $rc after $((SECONDS - start)) s"
    tail -n 20 "$parts/$name.log" | sed 's/^/    /'
    "$python" bench/gpu_report.py "$parts" "$file" || echo "gpu_check: the report could not be written"
    return "$rc"
}

bench() { # NAME SECONDS OP ARGUMENTS...
    local name=bench-$1 limit=$2
    shift 2
    part "$name" "$limit" "$python" -m bench "$@" "${sized[@]}" --json "$parts/$name.json"
}

if [ $device = cuda ]; then
    sized=(--device cuda --rounds 20 --budget 1.5)
    tests=(-m gpu tests)
    part nvidia-smi 20 nvidia-smi
    part machine 40 "$python" -m bench.report
    # code for this GPU alone: half of the time to compile (9.0a: Hopper's own instructions)
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1)
    export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-${capability/#9.0/9.0a}}"
    part build 160 make build VENV= PYTHON="$python" ||
        MEGACORE_CUDA=0 part build-without-cuda 90 make build VENV= PYTHON="$python" # Triton and the CPU still run
else
    sized=(--device cpu --rounds 2 --quick --rivals torch-eager liger --only dtype=fp32)
    tests=(tests/ops/test_dispatch.py)
    part machine 60 "$python" -m bench.report
    part build 60 "$python" -c "import megacore.ops"
fi
part tests 90 "$python" -m pytest -v -p no:cacheprovider --continue-on-collection-errors "${tests[@]}"
bench linear_gelu 60 linear_gelu
bench cross_entropy 50 cross_entropy
bench linear_cross_entropy 40 linear_cross_entropy
bench linear_swiglu 30 linear_swiglu
bench linear_gelu-triton 40 linear_gelu --impl triton --rivals torch-eager
bench linear 20 linear
bench dropout 20 dropout
echo "gpu_check: $SECONDS s, written to $file"
