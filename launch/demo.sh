#!/bin/bash
# bash launch/demo.sh [--steps N] [dotted.key=value ...]     what `make demo` runs: `pervit demo` in the repository's folder
#
#   source .venv/bin/activate && bash launch/demo.sh
#   CUDA_VISIBLE_DEVICES= bash launch/demo.sh              # on the CPU of a machine with GPUs
#
# From nothing to a trained, evaluated PerViT-T on this machine, in a few minutes. It writes demo/ and runs/demo/.
set -euo pipefail

case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python -m pipeline.demo "$@"
