#!/bin/bash
# launch/local.sh N -- MODULE ARGS...     run N processes of `python -m MODULE ARGS` on this machine
#
#   launch/local.sh 2 -- pipeline.train --config configs/pervit_t.yaml train.max_steps=10
#
# Rank 0 has the terminal. The other ranks are silent; the one that fails first shows its errors.
# When a rank fails the others are ended and its exit code is returned; Ctrl-C ends them all.
set -uo pipefail

fail() { echo "error: $*" >&2; exit 2; }

ranks=${1:-}
if ! [[ $ranks =~ ^[1-9][0-9]*$ ]] || [ "${2:-}" != -- ] || [ -z "${3:-}" ]; then
  fail "found '$*', needed is 'N -- MODULE ARGS...'; for example: launch/local.sh 2 -- pipeline.train --config configs/pervit_t.yaml"
fi
shift 2
command -v python > /dev/null ||
  fail "no python was found on the PATH, one with this package is needed; run: make install && source .venv/bin/activate"

errors=$(mktemp -d)
trap 'rm -rf "$errors"' EXIT
set -m    # each rank leads a process group of its own, so that its helper processes end with it

pids=()                                    # of the ranks that still run
end_all() {
  local pid second
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid"; done
  for second in {1..5}; do                 # a rank inside a collective call does not hear SIGTERM
    [ -z "$(jobs -pr)" ] && break
    sleep 1
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid"; done
  [ "${#pids[@]}" = 0 ] || wait -f "${pids[@]}"   # -f: until they have ended, not only until one is stopped
} 2> /dev/null                             # bash would announce each ended process

trap 'end_all; exit 130' INT
trap 'end_all; exit 143' TERM HUP

export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1
MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
export MASTER_PORT
# Divide the cores among the ranks; by default each rank would start a thread for every core.
share=$(($(nproc) / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
# PyTorch prints a C++ traceback for each connection that a lost rank leaves behind; the rank that notices says it in a sentence.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

for ((rank = 0; rank < ranks; rank++)); do
  export RANK=$rank LOCAL_RANK=$rank
  if [ "$rank" = 0 ]; then
    python -u -m "$@" < /dev/null &
  else
    python -u -m "$@" < /dev/null > /dev/null 2> "$errors/$rank" &
  fi
  pids+=($!)
done

while [ "${#pids[@]}" != 0 ]; do
  wait -n -p ended "${pids[@]}"
  code=$?
  if [ -z "${ended:-}" ]; then sleep 1; continue; fi   # all ranks are stopped (SIGSTOP): bash would not wait for them
  for rank in "${!pids[@]}"; do [ "${pids[rank]}" = "$ended" ] && break; done
  if [ "$code" != 0 ]; then
    end_all
    if [ "$rank" != 0 ]; then
      echo "rank $rank failed with exit code $code:" >&2
      cat "$errors/$rank" >&2
    fi
    exit "$code"
  fi
  unset "pids[rank]"
done
