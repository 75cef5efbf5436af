# launch/train_job.sh CONFIG [dotted.key=value ...]: what train.slurm and pervit_{t,s,m}.slurm have in common.
#
# Sourced by a Slurm batch script in the repository root; runs on the job's first node and starts
# one task for each GPU. PERVIT_DATA and PERVIT_OUTPUT, where set, replace the config's folders.
#
# A training that was stopped or crashed is started again by requeueing the job, under the same id:
#
#   srun's exit code   what happened                                   what follows
#   0                  the last epoch is done                          the job is COMPLETED
#   2                  a mistake that a restart does not mend          the job is FAILED
#   75                 a signal (the time limit is near); what was     requeue
#                      trained is saved
#   any other          a crash, a killed or lost process               requeue, as pipeline.faults.restart allows
#
# srun's code is the highest among the tasks, so they must end by themselves: a SIGTERM from srun when
# the first one fails would make 143 of the others' 2 or 75, and would ask them to save together with
# a dead one. Tasks that lose another notice it and exit with 76; --wait ends those that do not.
#
# The signal comes by the #SBATCH line --signal=USR1@300, without the "B:" that would send it to this
# shell alone: every task hears it itself, so nothing depends on a trap here, which bash runs only
# between two commands. Slurm gives it to all processes of a task, helper processes too. It comes up
# to a minute early. The 300 seconds are for the step in progress and the checkpoint.
#
# scancel sends the tasks SIGTERM; they have KillWait seconds (Slurm's default: 30) for the checkpoint.
# scancel --signal=USR1 JOB stops the training now and requeues the job.
#
# In a job array every task is a run of its own, and requeues itself alone. A literal %a in PERVIT_OUTPUT and in the
# words after CONFIG becomes the number of the task, as in sbatch's --output:
#
#   sbatch --array=0-2 --output=%x-%A_%a.out launch/train.slurm configs/convit_s.yaml seed=%a output_dir=runs/seed_%a
#
# Two tasks with one folder: the second is refused while the first one trains.

case ${1:-} in -h | --help) sed -n '1,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac

fail() { echo "error: $*" >&2; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] ||
  fail "no Slurm job was found, this script is part of one; submit it: sbatch launch/train.slurm configs/pervit_t.yaml"

whole_number() { [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$1 is '$2', a whole number is needed; it is Slurm's to set, so unset it."; }
whole_number SLURM_JOB_ID "$SLURM_JOB_ID"
whole_number SLURM_RESTART_COUNT "${SLURM_RESTART_COUNT:-0}"
whole_number SLURM_CPUS_PER_TASK "${SLURM_CPUS_PER_TASK:-1}"

config=$1 job=$SLURM_JOB_ID
shift
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID   # one task's own id is also the array's: scontrol would take it for all
  set -- "${@//[%]a/$SLURM_ARRAY_TASK_ID}"
  PERVIT_OUTPUT=${PERVIT_OUTPUT:-}
  PERVIT_OUTPUT=${PERVIT_OUTPUT//[%]a/$SLURM_ARRAY_TASK_ID}
fi

# All nodes must see the virtual environment, so it lives beside the code on the shared disk.
venv=${PERVIT_VENV:-.venv}
if [ -f "$venv/bin/activate" ]; then
  source "$venv/bin/activate"
elif [ -n "${PERVIT_VENV:-}" ]; then
  fail "PERVIT_VENV is '$venv', which has no bin/activate; set it to a virtual environment or unset it."
fi
command -v python > /dev/null ||
  fail "no python was found in $venv or on the PATH, one with this package is needed; run: make install"
python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ("torch", "deepspeed"))))' ||
  fail "$(command -v python) has no PyTorch or no DeepSpeed, a python with this package is needed; run: make install"

# The tasks meet at the first node. The port follows from the job id, which differs among the tasks of an
# array too, so that jobs which share a node do not meet each other, and from the restart count, so that
# a requeued job does not meet a task of its earlier life. It stays below 32768, where ports for outgoing connections begin.
# Tasks that are all on one node meet at its loopback address, which no other machine reaches.
if [ "${SLURM_NNODES:-}" = 1 ]; then
  MASTER_ADDR=127.0.0.1
else
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
export MASTER_ADDR MASTER_PORT
PERVIT_JOB_SECRET=$(python -c 'import secrets; print(secrets.token_hex(32))') && export PERVIT_JOB_SECRET

# When the first task dies, PyTorch would print a C++ traceback for every other one above the sentence that names it.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# Without this every task would start as many compute threads as the node has cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
[ -n "$PERVIT_JOB_SECRET" ] || fail "$(command -v python) failed, see above, and random numbers are needed of it; run: make install"

echo "job $job on $SLURM_JOB_NODELIST, restarts: ${SLURM_RESTART_COUNT:-0}, number of tasks: $SLURM_NTASKS," \
  "meeting at $MASTER_ADDR:$MASTER_PORT"

# Later overrides win, so the ones from the sbatch line come last.
run=(--config "$config" ${PERVIT_DATA:+"data.path=$PERVIT_DATA"} ${PERVIT_OUTPUT:+"output_dir=$PERVIT_OUTPUT"} "$@")

# When Slurm ends the job this shell gets SIGTERM too. It must outlive the tasks: they are saving.
trap : TERM

# pipeline.train reads its rank from Slurm's variables: no ssh, no torchrun.
#   --kill-on-bad-exit   0: no SIGTERM when a task fails, see above
#   --wait               seconds from the first task's end to SIGTERM for the others; well above
#                        distributed.silence_timeout, after which they name the lost task and end
#   --export=ALL         the tasks keep this environment even if sbatch was given --export=NONE
#   --cpus-per-task      srun has ignored the batch script's setting since Slurm 22.05
code=0
srun --kill-on-bad-exit=0 --wait=120 --label --export=ALL --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -u -m pipeline.train "${run[@]}" || code=$?
trap '' TERM                               # from here on for the commands below too: they decide whether the run goes on

# ---- the end: start again? ---------------------------------------------------------------------

case $code in 0 | 2) exit "$code" ;; esac

end() { echo "job $job is not requeued: $*" >&2; exit "$code"; }

# Where one unanswered question would end a run of days, the controller has a minute or two to come back.
ask_slurm() {
  local attempt
  for attempt in {1..6}; do
    if scontrol "$@"; then return 0; fi
    sleep 10
  done
  return 1
}

# A job that Slurm is ending is COMPLETING, and so no longer RUNNING, before its tasks hear of it:
# that tells scancel from any other signal. scontrol would requeue a cancelled job all the same.
# At the time limit the reason is TimeLimit: the early signal was not enough, but it may go on. A job
# that Slurm itself requeues has one restart more than this life of it knows of.
see_that_it_may_go_on() {
  local shown
  shown=$(ask_slurm show job --oneliner "$job") || end "scontrol does not answer. Submit the same command again."
  case $shown in
    *" Requeue=0 "*)
      end "it was submitted with --no-requeue. Submit the same command again, it goes on from the newest checkpoint." ;;
    *" JobState=RUNNING "* | *" Reason=TimeLimit "*) ;;
    *" Restarts=${SLURM_RESTART_COUNT:-0} "*)
      end "it was cancelled. Submit the same command again, it goes on from the newest checkpoint." ;;
    *) end "Slurm has done so already, after a failed node or by request." ;;
  esac
}

see_that_it_may_go_on
python -m pipeline.faults.restart --exit-code "$code" "${run[@]}" || exit "$code"
see_that_it_may_go_on                      # again: it may have been cancelled in these seconds
ask_slurm requeue "$job" || end "scontrol refused, see above. Submit the same command again."
exit "$code"                               # of no consequence: Slurm has put the job back into the queue
