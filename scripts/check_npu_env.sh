#!/usr/bin/env bash
# Checks this machine for training and evaluation on Ascend NPUs; also right on CUDA and CPU machines.
#
#   bash scripts/check_npu_env.sh [--json] [--fix-hints]
#   PYTHON=/other/venv/bin/python bash scripts/check_npu_env.sh     # look at another environment
#
# Exit code 0: nothing fails; 1: something fails; 2: there is no Python >= 3.9 to run the checks.
# Same as `python -m perl doctor`, but starts where nothing is installed: bash until a Python is found.
set -u
here="${BASH_SOURCE[0]%/*}" # without dirname, which a bare container may lack
if [ "$here" = "${BASH_SOURCE[0]}" ]; then here=.; fi
root="$(cd "$here/.." && pwd)"

usable() { # a Python that can run the doctor
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1
}

candidates=()
if [ -n "${PYTHON:-}" ]; then
    candidates+=("$PYTHON") # the user's choice, and no other: a different environment would be the wrong answer
else
    # An environment that is active was chosen, but for conda's base, which every shell begins with. As dapo_lora_npu.sh.
    if [ -n "${VIRTUAL_ENV:-}" ] || [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then candidates+=(python); fi
    candidates+=("$root/.venv-npu/bin/python" "$root/.venv/bin/python")
    candidates+=(python3.11 python3 python3.12 python3.13 python3.10 python3.9 python)
fi
for python in "${candidates[@]}"; do
    if usable "$python"; then
        PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m perl.tools.doctor "$@"
    fi
done

# No Python: what bash alone can see.
json=0
for argument in "$@"; do
    case "$argument" in
    --json) json=1 ;;
    --fix-hints | --fix_hints) ;;
    *)
        echo "error: unknown argument '$argument'; known: --json, --fix-hints" >&2
        exit 2
        ;;
    esac
done

names=() states=() texts=()
note() { names+=("$1") states+=("$2") texts+=("$3"); }

missing="${PYTHON:+$PYTHON is not a Python >= 3.9}"
note python failure "${missing:-no Python >= 3.9 found} | the checks need one | fix: apt-get install -y python3, or curl -LsSf https://astral.sh/uv/install.sh | sh && uv python install 3.11"
note architecture ok "$(uname -m 2>/dev/null || echo "${HOSTTYPE:-unknown}")"
shopt -s nullglob
devices=(/dev/davinci[0-9]*)
if [ ${#devices[@]} -gt 0 ]; then
    note device-files ok "${#devices[@]} NPU device files"
elif [ -d /usr/local/Ascend ] || command -v npu-smi >/dev/null 2>&1; then
    note device-files failure "no /dev/davinci* | no NPU can be used | fix: start the container with --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc, or install the driver"
else
    note device-files ok "no NPU here"
fi
if command -v npu-smi >/dev/null 2>&1; then
    limit=() # a hanging driver must not hang us, where there is a timeout command
    if command -v timeout >/dev/null 2>&1; then limit=(timeout 5); fi
    if listing="$("${limit[@]}" npu-smi info 2>&1)"; then
        note npu-smi ok "npu-smi info answers"
    else
        note npu-smi failure "npu-smi info fails: ${listing##*$'\n'} | no device can be listed | fix: npu-smi info"
    fi
fi
toolkits=(/usr/local/Ascend/ascend-toolkit/latest /usr/local/Ascend/cann /usr/local/Ascend/cann-*)
for toolkit in "${toolkits[@]}"; do
    if [ -d "$toolkit" ]; then
        note cann ok "$toolkit"
        break
    fi
done

if [ "$json" = 1 ]; then
    printf '{"kind": "unknown", "exit_code": 2, "checks": {'
    for i in "${!names[@]}"; do
        text="${texts[$i]//\\/\\\\}"
        [ "$i" -gt 0 ] && printf ', '
        printf '"%s": {"status": "%s", "found": "%s"}' "${names[$i]}" "${states[$i]}" "${text//\"/\\\"}"
    done
    printf '}}\n'
else
    for i in "${!names[@]}"; do printf '%-7s  %-12s  %s\n' "${states[$i]}" "${names[$i]}" "${texts[$i]}"; done
    echo "cannot run: the other checks need Python"
fi
exit 2
