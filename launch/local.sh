#!/bin/bash
# launch/local.sh N -- MODULE ARGS...     run N processes of `python -m MODULE ARGS` on this machine
#
#   launch/local.sh 2 -- pipeline.train --config configs/pervit_t.yaml train.max_steps=10
#   launch/local.sh 2 -- pipeline.evaluate --checkpoint runs/pervit_t --data data/imagenet
#
# Python: the active environment, else .venv of this repository; PERVIT_VENV names another.
#
# Rank 0 writes to the terminal. The other ranks are silent; the errors of the first one that fails are shown.
# When a rank fails, the others are terminated and its exit code is returned; Ctrl-C terminates all. SIGTERM,
# SIGUSR1 and SIGHUP (the terminal was closed) are forwarded: a training saves what it has trained and exits with
# code 75. One minute after SIGTERM or SIGHUP, or at a second SIGTERM, all ranks are killed. With nohup the training
# survives the terminal. If this launcher is killed, its ranks receive SIGTERM.
set -uo pipefail

fail() { echo "error: $*" >&2; exit 2; }

case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac

ranks=${1:-}
if ! [[ $ranks =~ ^[1-9][0-9]*$ ]] || [ "${2:-}" != -- ] || [ -z "${3:-}" ]; then
  fail "the arguments must be 'N -- MODULE ARGS...', got '$*'; for example: launch/local.sh 2 -- pipeline.train --config configs/pervit_t.yaml"
fi
shift 2

# An environment is active if the python on the PATH belongs to it. Conda's base does not count: many have it in every shell.
in_environment() {
  python -c 'import os, sys
conda = os.path.isdir(os.path.join(sys.prefix, "conda-meta")) and os.environ.get("CONDA_DEFAULT_ENV") != "base"
sys.exit(sys.prefix == sys.base_prefix and not conda)' 2> /dev/null
}
venv=$(dirname "${BASH_SOURCE[0]}")/../.venv
if [ -n "${PERVIT_VENV:-}" ]; then
  [ -x "$PERVIT_VENV/bin/python" ] ||
    fail "PERVIT_VENV must have bin/python, got '$PERVIT_VENV'; set it to a virtual environment or unset it."
  PATH=$PERVIT_VENV/bin:$PATH
elif [ -x "$venv/bin/python" ] && ! in_environment; then
  PATH=$(realpath "$venv")/bin:$PATH
fi
command -v python > /dev/null ||
  fail "no python on the PATH: one with this package is required; run: make install"
python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ("torch", "deepspeed"))))' ||
  fail "$(command -v python) must have PyTorch and DeepSpeed; run: make install && source .venv/bin/activate"

errors=$(mktemp -d 2> /dev/null) ||
  fail "cannot create a folder for the ranks' messages in ${TMPDIR:-/tmp}; set TMPDIR to a writable folder."
set -m    # each rank leads its own process group, so that its helper processes end with it

pids=()                                    # of the running ranks
end_all() {
  local pid second
  for pid in "${pids[@]}"; do kill -TERM -- "-$pid"; done
  [ -z "$timer" ] || kill "$timer"
  timer=
  for second in {1..5}; do                 # a rank inside a collective does not handle SIGTERM
    [ -z "$(jobs -pr)" ] && break
    sleep 1
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid"; done
  [ "${#pids[@]}" = 0 ] || wait -f "${pids[@]}"   # -f: until they have exited; without it also when one is stopped
} 2> /dev/null                             # bash would report each process that exits

timer=                                     # after SIGTERM or SIGHUP: a sleep, at whose end all ranks are killed
pass_on() { for pid in "${pids[@]}"; do kill -"$1" -- "-$pid"; done; }
end_soon() {                               # end_soon SIGNAL CODE
  pass_on "$1"
  code_if_late=$2
  sleep 60 &
  timer=$!
}
terminate() {
  if [ -n "$timer" ]; then end_all; exit 143; fi
  end_soon TERM 143
}
hang_up() { [ -n "$timer" ] || end_soon HUP 129; }   # the shell and the kernel each send one
trap '[ -z "$timer" ] || kill "$timer"; rm -rf "$errors"' EXIT

# Once, where each rank would say it in Python's words. Other errors of a package that is there are the ranks' to show.
python -c 'import importlib.util, sys
name = sys.argv[1]
try:
    found = None if name.startswith(".") else importlib.util.find_spec(name)
    if found and found.submodule_search_locations is not None:
        found = importlib.util.find_spec(f"{name}.__main__")
except ModuleNotFoundError as error:
    found = not f"{name}.".startswith(f"{error.name}.")
except Exception:
    found = True
sys.exit(not found)' "$1" ||
  fail "'$1' is not a module that 'python -m' can run in $PWD; pass the name of one, such as pipeline.train or" \
    "pipeline.evaluate, or go to the folder that it is in."

export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1
MASTER_PORT=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export MASTER_PORT
PERVIT_JOB_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))') && export PERVIT_JOB_SECRET
# Divide the cores among the ranks; by default each rank would start one thread per core.
share=$(($(nproc) / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
# PyTorch prints a C++ traceback for each connection that a lost rank leaves behind; the heartbeat reports it in one sentence.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
[ -n "$MASTER_PORT" ] && [ -n "$PERVIT_JOB_SECRET" ] ||
  fail "$(command -v python) failed, see above: it must give a free port and random numbers; run: make install"

# However this launcher ends, the kernel then sends SIGTERM to its ranks: each rank first asks for that.
export PERVIT_LAUNCHER_PID=$$
rank_program='
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)             # PR_SET_PDEATHSIG, SIGTERM; survives exec
if str(os.getppid()) != os.environ["PERVIT_LAUNCHER_PID"]:
    sys.exit(143)                          # the launcher is gone already
os.execvp("python", ["python", "-u", "-m", *sys.argv[1:]])
'
# Not before: until a rank is there to hear a signal, the launcher itself ends by it.
trap 'end_all; exit 130' INT
trap hang_up HUP
trap terminate TERM
trap 'pass_on USR1' USR1
for ((rank = 0; rank < ranks; rank++)); do
  export RANK=$rank LOCAL_RANK=$rank
  if [ "$rank" = 0 ]; then
    python -I -S -c "$rank_program" "$@" < /dev/null &
  else
    python -I -S -c "$rank_program" "$@" < /dev/null > /dev/null 2> "$errors/$rank" &
  fi
  pids+=($!)
done

while [ "${#pids[@]}" != 0 ]; do
  wait -n -p ended "${pids[@]}" $timer 2> /dev/null   # bash would report a rank that was killed, by its command
  code=$?
  if [ -n "$timer" ] && [ "${ended:-}" = "$timer" ]; then end_all; exit "$code_if_late"; fi
  if [ -z "${ended:-}" ]; then             # a signal was forwarded, or all are stopped (SIGSTOP) and bash does not wait
    sleep 1
    for pid in "${pids[@]}"; do            # one that exited meanwhile is not reported again
      if ! kill -0 "$pid" 2> /dev/null; then wait "$pid"; code=$? ended=$pid; break; fi
    done
    [ -n "${ended:-}" ] || continue
  fi
  for rank in "${!pids[@]}"; do [ "${pids[rank]}" = "$ended" ] && break; done
  if [ "$code" != 0 ]; then
    if [ "$code" = 2 ] && [ "$rank" != 0 ] && [ -n "${pids[0]:-}" ]; then
      # A mistake in a config fails all ranks. Rank 0 reports it on the terminal; wait for that, so that it is not shown twice.
      for _ in {1..25}; do kill -0 "${pids[0]}" 2> /dev/null || break; sleep 0.2; done
      if ! kill -0 "${pids[0]}" 2> /dev/null; then
        wait "${pids[0]}"
        [ $? != 2 ] || rank=0
        unset 'pids[0]'
      fi
    fi
    end_all
    if [ "$code" = 137 ]; then killed=", killed (for lack of memory? see dmesg)"; else killed=; fi
    if [ -n "$killed" ] || { [ "$rank" != 0 ] && [ "$code" != 75 ]; }; then   # 75: stopped by a signal, what was trained is saved
      if [ -s "$errors/$rank" ]; then said=:; else said=; fi
      echo "rank $rank failed with exit code $code$killed$said" >&2
      [ -z "$said" ] || cat "$errors/$rank" >&2
    fi
    exit "$code"
  fi
  unset "pids[rank]"
done
