#!/usr/bin/env bash
# Trains a tiny model by GRPO with LoRA and AQN, scores it before and after on held-out problems, shows both,
# and writes a page with the curves and the completions.
#
#   bash scripts/quickstart.sh        from any folder; `make quickstart` sets up .venv first
#
# Environment (all optional):
#   QUICKSTART_SEED    seed of training and evaluation (1)
#   QUICKSTART_ENGINE  what evaluates: hf (transformers) or vllm (hf)
#   PYTHON             the Python to use (.venv's, else python3)
# Everything is written to outputs/quickstart_<seed>_<date>, with report.html; the last line on the screen is JSON.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$repo/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=$(command -v python3) || { echo "error: no python3 found; set PYTHON" >&2; exit 2; }
fi
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"

exec "$PYTHON" -m perl.tools.quickstart \
    --seed "${QUICKSTART_SEED:-1}" --engine "${QUICKSTART_ENGINE:-hf}" "$@"
