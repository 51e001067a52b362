#!/usr/bin/env bash
# Makes the environment for training and evaluation on Ascend NPUs, .venv-npu: what requirements_npu.txt and
# requirements_vllm_npu.txt pin (torch 2.10.0, transformers 5.5.4, TRL, vLLM 0.23.0), for CANN 9.1 and its NNAL.
#
#   bash scripts/install_npu.sh [--dry-run] [--python 3.11]
#
# --dry-run prints the commands and runs none. --python: 3.12, as in the container, else 3.11, where only that is here.
# Driver, firmware, CANN and NNAL are not installed: they need root and Huawei's packages (docs/ascend.md);
# scripts/check_npu_env.sh, which runs at the end, says what is missing of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,9{s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
fail() {
    echo "error: $1" >&2
    exit 2
}

dry_run=0 version=3.12 venv=.venv-npu
runs() { "$1" -c "" 2>/dev/null; } # a name on PATH may be a shim that leads nowhere
if ! runs python3.12 && runs python3.11; then version=3.11; fi
while [ $# -gt 0 ]; do
    case "$1" in
    --dry-run) dry_run=1 ;;
    --python)
        [ $# -gt 1 ] || fail "--python needs a version, such as 3.11"
        version=$2 && shift
        ;;
    -h | --help) usage && exit 0 ;;
    *) fail "unknown argument '$1'; known: --dry-run, --python" ;;
    esac
    shift
done

run() { # print a command, then run it
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    if [ "$dry_run" = 0 ]; then "$@"; fi
}

case "$(uname -m)" in
aarch64) index=() ;;
# torch-npu's x86_64 wheels want torch with the local version +cpu, which PyTorch's own index has and the registry lacks.
x86_64) index=(--extra-index-url https://download.pytorch.org/whl/cpu) ;;
*) fail "$(uname -m): torch-npu is published for aarch64 and x86_64 only" ;;
esac

# uv where there is one (it also fetches Python), else venv and pip.
if command -v uv >/dev/null; then
    run uv venv --allow-existing --python "$version" $venv
    # uv takes each package from the first index that has it; with a second index, let it see both.
    install=(uv pip install --python $venv/bin/python --index-strategy unsafe-best-match)
elif [ "$dry_run" = 1 ] || runs "python$version"; then
    run "python$version" -m venv $venv
    install=($venv/bin/python -m pip install)
else
    fail "neither uv nor python$version is here; apt-get install python$version-venv, or pip install uv"
fi
install+=(${index[@]+"${index[@]}"})

run "${install[@]}" -r requirements_npu.txt -e .
run "${install[@]}" -r requirements_vllm_npu.txt
# The one step without dependencies. vllm 0.23.0 declares torch 2.11.0 and CUDA packages, vllm-ascend 0.23.0 torch 2.10.0:
# with dependencies this line would replace torch and break torch-npu. vllm-ascend brings the NPU's kernels, so vllm's own
# are never loaded, and requirements_vllm_npu.txt lists what vllm's Python code imports.
run "${install[@]}" --no-deps vllm==0.23.0
run env PYTHON=$venv/bin/python bash scripts/check_npu_env.sh || [ $? = 1 ]
