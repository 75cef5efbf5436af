#!/bin/bash
# launch/local.sh N -- MODULE ARGS...     run N processes of `python -m MODULE ARGS` on this machine
#
#   launch/local.sh 2 -- pipeline.train --config configs/pervit_t.yaml train.max_steps=10
#
# Rank 0 has the terminal. The other ranks are silent; the one that fails first shows its errors.
# When a rank fails the others are ended and its exit code is returned; Ctrl-C ends them all. SIGTERM and
# SIGUSR1 are passed on: a training saves a checkpoint and ends with exit code 75. A minute after SIGTERM, or at a
# second one, all are ended.
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
set -m    # each rank leads a process group of its own, so that its helper processes end with it

pids=()                                    # of the ranks that still run
end_all() {
  local pid second
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid"; done
  [ -z "$timer" ] || kill "$timer"
  timer=
  for second in {1..5}; do                 # a rank inside a collective call does not hear SIGTERM
    [ -z "$(jobs -pr)" ] && break
    sleep 1
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid"; done
  [ "${#pids[@]}" = 0 ] || wait -f "${pids[@]}"   # -f: until they have ended, not only until one is stopped
} 2> /dev/null                             # bash would announce each ended process

timer=                                     # after SIGTERM: a sleep, at the end of which nobody is waited for any longer
pass_on() { for pid in "${pids[@]}"; do kill -"$1" -- "-$pid"; done; }
terminate() {
  if [ -n "$timer" ]; then end_all; exit 143; fi
  pass_on TERM
  sleep 60 &
  timer=$!
}
trap '[ -z "$timer" ] || kill "$timer"; rm -rf "$errors"' EXIT
trap 'end_all; exit 130' INT
trap 'end_all; exit 129' HUP
trap terminate TERM
trap 'pass_on USR1' USR1

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
  wait -n -p ended "${pids[@]}" $timer
  code=$?
  if [ -n "$timer" ] && [ "${ended:-}" = "$timer" ]; then end_all; exit 143; fi
  if [ -z "${ended:-}" ]; then             # a signal was passed on, or all are stopped (SIGSTOP) and bash does not wait
    sleep 1
    for pid in "${pids[@]}"; do            # one that ended meanwhile is not reported a second time
      if ! kill -0 "$pid" 2> /dev/null; then wait "$pid"; code=$? ended=$pid; break; fi
    done
    [ -n "${ended:-}" ] || continue
  fi
  for rank in "${!pids[@]}"; do [ "${pids[rank]}" = "$ended" ] && break; done
  if [ "$code" != 0 ]; then
    if [ "$code" = 2 ] && [ "$rank" != 0 ] && [ -n "${pids[0]:-}" ]; then
      # A mistake in a config is one for all ranks: rank 0 has the terminal and says it, given a moment. Else it would be there twice.
      for _ in {1..25}; do kill -0 "${pids[0]}" 2> /dev/null || break; sleep 0.2; done
      if ! kill -0 "${pids[0]}" 2> /dev/null; then
        wait "${pids[0]}"
        [ $? != 2 ] || rank=0
        unset 'pids[0]'
      fi
    fi
    end_all
    if [ "$rank" != 0 ] && [ "$code" != 75 ]; then   # 75: a checkpoint was saved, all is well
      echo "rank $rank failed with exit code $code:" >&2
      cat "$errors/$rank" >&2
    fi
    exit "$code"
  fi
  unset "pids[rank]"
done
