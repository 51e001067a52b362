#!/usr/bin/env bash
# GRPO with LoRA and AQN on DAPO-Math: on NPUs if there are any, else on CUDA GPUs, else on the CPU.
#
#   bash scripts/trl/openr1/dapo_lora_npu.sh [--recipe FILE] [--config.<group>.<field> VALUE …]
#   bash scripts/trl/openr1/dapo_lora_npu.sh --help [GROUP|all]
#
# Environment (all optional):
#   NUM_PROCESSES      processes, one a device (all visible devices; 1 on a CPU)
#   ACCELERATE_CONFIG  one of scripts/accelerate/*.yaml (single.yaml for one process, ZeRO-2 on several NPUs or GPUs)
#   PYTHON             the Python to use (the active environment's, else .venv-npu's, as install_npu.sh makes it, else
#                      .venv's, else python3)
# Everything is written to <run folder>/output.log; progress and errors stay on the screen.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
candidates=("$repo/.venv-npu/bin/python" "$repo/.venv/bin/python" "$(command -v python3 || true)")
# An environment that is active was chosen, but for conda's base, which every shell begins with. As in check_npu_env.sh.
if [ -n "${VIRTUAL_ENV:-}" ] || [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then
    candidates=("$(command -v python || true)" "${candidates[@]}")
fi
for candidate in "${candidates[@]}"; do
    if [ -z "${PYTHON:-}" ] && [ -x "$candidate" ]; then
        PYTHON=$candidate
    fi
done
[ -n "${PYTHON:-}" ] || { echo "error: no python3 found; install Python 3.11, or set PYTHON" >&2; exit 2; }
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

recipe=
for word in "$@"; do
    case $word in
        --help | -h) exec "$PYTHON" -m perl.train "$@" ;;
        --recipe | --recipe=*) recipe=$word ;;
    esac
done
[ -n "$recipe" ] || set -- --recipe "$repo/recipes/dapo_lora.yaml" "$@"

# Threads of several CPU processes would fight for the cores; one each is up to ten times faster.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

# A pod's place among others (Kubeflow, Volcano): a process of rank 1 would leave it to rank 0 to say what is wrong.
if [ "${WORLD_SIZE:-1}" != 1 ]; then
    echo "WORLD_SIZE=$WORLD_SIZE is not read: this trains on this machine alone; several nodes: docs/ascend.md" >&2
fi
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

# A signal that comes while the command line is checked ends the script when that is done; nothing has been started.
trap 'exit 143' TERM
trap 'exit 130' INT

# Checks the whole command line, says DEVICE, NUM_PROCESSES, ACCELERATE_CONFIG, RUN_DIR, and exports the variables of
# perl/device/__init__.py (HCCL_BUFFSIZE, …) that the user has not set.
# (Not as eval "$(…)": that would lose the exit code.)
plan=$("$PYTHON" -m perl.tools.launch "$@") || exit $?
trap - TERM INT
eval "$plan"

echo "run folder: $RUN_DIR"
echo "$NUM_PROCESSES process(es) on $DEVICE, $(basename "$ACCELERATE_CONFIG"); everything else goes to output.log"

# From here on signals reach the supervisor, which has the processes save a checkpoint and end.
export PERL_NUM_PROCESSES=$NUM_PROCESSES
exec "$PYTHON" -u -m perl.tools.supervise "$RUN_DIR" --config_file "$ACCELERATE_CONFIG" \
    --num_processes "$NUM_PROCESSES" -m perl.train "$@" --config.training.output_dir "$RUN_DIR"
