#!/usr/bin/env bash
# Makes the environments for Ascend NPUs:
#   .venv-train   requirements_npu.txt       torch 2.10.0, transformers 5.5.4, TRL         CANN 9.1
#   .venv-eval    requirements_vllm_npu.txt  torch 2.9.0, transformers 4.57.6, vLLM 0.18.0  CANN 8.5.1 and NNAL
#   .venv-one     requirements_npu_one.txt   both in one, with vLLM 0.23.0; triton-ascend from Ascend's index  CANN 9.1 and NNAL
# The first two are the default (all): vllm-ascend 0.18.0 pins another torch and another transformers than training wants.
#
#   bash scripts/install_npu.sh [train|eval|all|one] [--dry-run] [--python 3.11]
#
# --dry-run prints the commands and runs none. Driver, firmware, CANN and NNAL are not installed: they need root and
# Huawei's packages (docs/ascend.md); scripts/check_npu_env.sh, which runs at the end, says what is missing of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,11{s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"; }
fail() {
    echo "error: $1" >&2
    exit 2
}

what=all dry_run=0 version=3.11
while [ $# -gt 0 ]; do
    case "$1" in
    train | eval | all | one) what=$1 ;;
    --dry-run) dry_run=1 ;;
    --python) version=${2:?--python needs a version, such as 3.11} && shift ;;
    -h | --help) usage && exit 0 ;;
    *) fail "unknown argument '$1'; known: train, eval, all, one, --dry-run, --python" ;;
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
    make_venv() { run uv venv --allow-existing --python "$version" "$1"; }
    install() { # environment, then pip's arguments
        local venv=$1
        shift
        # uv takes each package from the first index that has it; with a second index, let it see both.
        run uv pip install --python "$venv/bin/python" ${index[@]+"${index[@]}" --index-strategy unsafe-best-match} "$@"
    }
elif [ "$dry_run" = 1 ] || command -v "python$version" >/dev/null; then
    make_venv() { run "python$version" -m venv "$1"; }
    install() {
        local venv=$1
        shift
        run "$venv/bin/python" -m pip install ${index[@]+"${index[@]}"} "$@"
    }
else
    fail "neither uv nor python$version is here; apt-get install python$version-venv, or pip install uv"
fi

if [ "$what" = train ] || [ "$what" = all ]; then
    echo "# training: .venv-train"
    make_venv .venv-train
    install .venv-train -r requirements_npu.txt
    install .venv-train -e .
fi

if [ "$what" = eval ] || [ "$what" = all ]; then
    echo "# evaluation: .venv-eval"
    make_venv .venv-eval
    install .venv-eval -r requirements_vllm_npu.txt
    # The one step without dependencies. vllm 0.18.0 declares torch 2.10.0 and CUDA packages, vllm-ascend 0.18.0 torch
    # 2.9.0: with dependencies this line would replace torch and break torch-npu. vllm-ascend brings the NPU's kernels,
    # so vllm's own (built for CUDA and torch 2.10) are never loaded, and requirements_vllm_npu.txt lists what vllm's
    # Python code imports.
    install .venv-eval --no-deps vllm==0.18.0
fi

if [ "$what" = one ]; then
    echo "# training and evaluation: .venv-one"
    index+=(--extra-index-url https://mirrors.huaweicloud.com/ascend/repos/pypi) # triton-ascend 3.2.2
    make_venv .venv-one
    install .venv-one -r requirements_npu_one.txt
    install .venv-one -e .
    # As above: vllm 0.23.0 declares torch 2.11.0 and CUDA packages, vllm-ascend 0.23.0 torch 2.10.0.
    install .venv-one --no-deps vllm==0.23.0
fi

for venv in .venv-train .venv-eval .venv-one; do
    if [ "$venv" = ".venv-$what" ] || { [ "$what" = all ] && [ "$venv" != .venv-one ]; }; then
        run env PYTHON="$venv/bin/python" bash scripts/check_npu_env.sh || [ $? = 1 ]
    fi
done
