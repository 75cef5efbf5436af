#!/bin/bash
# launch/sweep.sh FILE     train all runs of a sweep on this machine: FILE has a line of overrides for each
#
#   launch/sweep.sh --grid --config demo optim.lr=1e-3,5e-4 seed=0,1 > sweep.txt
#   launch/sweep.sh sweep.txt
#   launch/sweep.sh --jobs 4 --processes 2 sweep.txt train.epochs=50     # 4 runs at a time, each on 2 GPUs
#   launch/sweep.sh --list sweep.txt                                     # how far each run is
#
# The same file goes to a cluster with: bash launch/sweep.slurm FILE
#
# The runs are in runs/ and the file's name, a folder each, with the page report.html that compares them. The same command resumes
# a stopped sweep. Ctrl-C lets the runs save what they have trained; a second one ends them at once.
# All options: python -m pipeline.sweep --help
#
# Python: the active environment, else .venv of this repository; PERVIT_VENV names another.
set -uo pipefail

fail() { echo "error: $*" >&2; exit 2; }

case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

# As in local.sh: an environment is active if the python on the PATH belongs to it; Conda's base does not count.
in_environment() {
  python -c 'import os, sys
conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta")) and os.environ.get("CONDA_DEFAULT_ENV") != "base"
sys.exit(sys.prefix == sys.base_prefix and not conda)' 2> /dev/null
}
root=$(dirname "${BASH_SOURCE[0]}")/..
if [ -n "${PERVIT_VENV:-}" ]; then
  [ -x "$PERVIT_VENV/bin/python" ] ||
    fail "PERVIT_VENV must have bin/python, got '$PERVIT_VENV'; set it to a virtual environment or unset it."
  PATH=$PERVIT_VENV/bin:$PATH
elif [ -x "$root/.venv/bin/python" ] && ! in_environment; then
  PATH=$(realpath "$root/.venv")/bin:$PATH
fi
command -v python > /dev/null ||
  fail "no python on the PATH: one with this package is required; run: make install"
python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("pipeline.sweep") is None)' 2> /dev/null ||
  fail "$PWD must be the repository's root, got no package pipeline there; go there."

exec python -m pipeline.sweep "$@"
