# launch/train_job.sh CONFIG [dotted.key=value ...]: shared by train.slurm, pervit_{t,s,m}.slurm and
# examples/detection/detection.slurm.
#
# Sourced by a Slurm batch script in the repository root; runs on the job's first node and starts one
# task per GPU. PERVIT_DATA and PERVIT_OUTPUT, if set, replace the config's data.path and output_dir.
#
# A training that was stopped or crashed is restarted by requeueing the job under the same id:
#
#   srun's exit code   what happened                                   what follows
#   0                  the last epoch is done                          the job is COMPLETED
#   2                  a mistake that a restart cannot fix             the job is FAILED
#   75                 a signal (time limit); what was trained is      requeue
#                      saved
#   any other          a crash, a killed or lost rank                  requeue, if pipeline.training.restart allows it
#
# srun's exit code is the highest of its tasks', so they must exit by themselves: a SIGTERM from srun after
# the first failure would turn the others' 2 or 75 into 143, and would ask them for a checkpoint together
# with a dead rank. Ranks that lose another one notice and exit with 76; --wait ends those that do not.
#
# The signal comes from the #SBATCH line --signal=USR1@300, without the "B:" that would send it to this
# shell alone: each task receives it, so nothing depends on a trap here, which bash runs only between two
# commands. Slurm sends it to all processes of a task, helper processes included, up to a minute early.
# The 300 seconds are for the current step and the checkpoint.
#
# scancel sends SIGTERM to the tasks; they have KillWait seconds (Slurm's default: 30) for the checkpoint.
# scancel --signal=USR1 JOB stops the training now and requeues the job.
#
# In a job array each task is a run of its own, which requeues itself alone. A literal %a in PERVIT_OUTPUT and
# in the words after CONFIG becomes the task's index, as in sbatch's --output:
#
#   sbatch --array=0-2 --output=%x-%A_%a.out launch/train.slurm configs/convit_s.yaml seed=%a output_dir=runs/seed_%a
#
# Of two tasks with one folder, the second is refused while the first one trains.
#
# The CPUs of a node are divided among its tasks, unless sbatch was given --cpus-per-task.
#
# A script that sources this one may set train_module and restart_module, for another training with the same options and exit
# codes than pipeline.train, and for the question whether it may be restarted.
#
# Where Python is in a container: PERVIT_SRUN has srun's options for it, or the command that runs it, split at spaces
# outside of quotes. Both see the repository, the shards and the run folder under the paths that they have here:
#
#   PERVIT_SRUN="--container-image=/images/pervit.sqsh --container-mounts=$PWD:$PWD,/data:/data --container-workdir=$PWD"
#   PERVIT_SRUN="apptainer exec --nv --bind /data /images/pervit.sif"
#
# PERVIT_CONTAINER, the name of an image, is made into PERVIT_SRUN: launch/container.sh.

case ${1:-} in -h | --help) sed -n '1,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac

fail() { echo "error: $*" >&2; exit 2; }

planned=                                   # --plan among the words: print what the job would take, see plan_job.sh
for word in "${@:2}"; do [ "$word" != --plan ] || planned=yes; done

[ -n "${SLURM_JOB_ID:-}" ] || [ -n "$planned" ] ||
  fail "this script must run in a Slurm job; submit it: sbatch launch/train.slurm configs/pervit_t.yaml"

whole_number() { [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$1 must be a whole number, got '$2'; Slurm sets it, so unset it."; }
whole_number SLURM_JOB_ID "${SLURM_JOB_ID:-0}"
whole_number SLURM_RESTART_COUNT "${SLURM_RESTART_COUNT:-0}"
whole_number SLURM_CPUS_PER_TASK "${SLURM_CPUS_PER_TASK:-1}"

config=$1 job=${SLURM_JOB_ID:-}
train_module=${train_module:-pipeline.train} restart_module=${restart_module:-pipeline.training.restart}
shift
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
  job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID   # the id of one task is also the whole array's: scontrol would act on all
  set -- "${@//[%]a/$SLURM_ARRAY_TASK_ID}"
  PERVIT_OUTPUT=${PERVIT_OUTPUT:-}
  PERVIT_OUTPUT=${PERVIT_OUTPUT//[%]a/$SLURM_ARRAY_TASK_ID}
fi

source launch/container.sh "$@"
container=()
if [ -n "${PERVIT_SRUN:-}" ]; then
  words=$(xargs -r printf '%s\n' <<< "$PERVIT_SRUN" 2> /dev/null) ||
    fail "PERVIT_SRUN must have closed quotes, got '$PERVIT_SRUN'; correct it or unset it."
  mapfile -t container <<< "$words"
fi

# All nodes must see the virtual environment, so it is beside the code on the shared file system. A container has its own
# Python, which cannot be asked here.
venv=${PERVIT_VENV:-.venv}
if [ -n "${PERVIT_SRUN:-}" ] && [ -z "${PERVIT_VENV:-}" ]; then
  venv=
elif [ -f "$venv/bin/activate" ]; then
  source "$venv/bin/activate"
elif [ -n "${PERVIT_VENV:-}" ]; then
  fail "PERVIT_VENV must have bin/activate, got '$venv'; set it to a virtual environment or unset it."
fi
if [ -z "${PERVIT_SRUN:-}" ]; then
  command -v python > /dev/null ||
    fail "no python in $venv or on the PATH: one with this package is required; run: make install"
  python -c 'import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, ("torch", "deepspeed"))))' ||
    fail "$(command -v python) must have PyTorch and DeepSpeed; run: make install"
fi

[ -z "$planned" ] || source launch/plan_job.sh "$@"

# The rendezvous is on the first node. Its port depends on the job id, which also differs among the tasks of an
# array, so that jobs on one node do not collide, and on the restart count, so that a requeued job does not
# meet tasks of its previous start. It stays below 32768, where the ports for outgoing connections begin.
# Tasks that are all on one node meet at its loopback address, which no other machine reaches.
if [ "${SLURM_NNODES:-}" = 1 ]; then
  MASTER_ADDR=127.0.0.1
else
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
export MASTER_ADDR MASTER_PORT
PERVIT_JOB_SECRET=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n')
export PERVIT_JOB_SECRET
[[ $PERVIT_JOB_SECRET =~ ^[0-9a-f]{64}$ ]] ||
  fail "od must give 32 random bytes of /dev/urandom, got '$PERVIT_JOB_SECRET'; check that this node has both."

# When a rank dies, PyTorch would print a C++ traceback on every other one, above the message that names the rank.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# An exclusive job has all CPUs of its nodes, which Slurm counts as "96(x2),64": each task gets its part of the smallest
# node. A number in the #SBATCH lines would be 4 cores of one machine and 8 of another, and idle cores on most.
extreme() { tr ',' '\n' <<< "$2" | sed 's/(.*//' | sort -n | "$1" -n 1; }
cpus=${SLURM_CPUS_PER_TASK:-}
if [ -z "$cpus" ]; then
  cpus=$(($(extreme head "${SLURM_JOB_CPUS_PER_NODE:-1}") / $(extreme tail "${SLURM_TASKS_PER_NODE:-1}")))
  [ "$cpus" -gt 0 ] || cpus=1
fi

# By default each task would start as many compute threads as the node has cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus}

echo "job $job on $SLURM_JOB_NODELIST, restarts: ${SLURM_RESTART_COUNT:-0}, number of tasks: $SLURM_NTASKS," \
  "CPUs for each: $cpus, meeting at $MASTER_ADDR:$MASTER_PORT"

# Later overrides win, so those of the sbatch line come last.
run=(--config "$config" ${PERVIT_DATA:+"data.path=$PERVIT_DATA"} ${PERVIT_OUTPUT:+"output_dir=$PERVIT_OUTPUT"} "$@")

# When Slurm ends the job, this shell gets SIGTERM too. It must outlive the tasks, which save a checkpoint.
trap : TERM

# The training reads its rank from Slurm's variables: no ssh, no torchrun.
#   --kill-on-bad-exit   0: no SIGTERM when a task fails, see above
#   --wait               seconds from the first task's exit to SIGTERM for the others; well above
#                        distributed.silence_timeout, after which they name the lost rank and exit
#   --export=ALL         the tasks keep this environment even if sbatch was given --export=NONE
#   --cpus-per-task      srun has ignored the batch script's setting since Slurm 22.05
#   --distribution       neighbouring ranks on one node and one socket; Slurm's default deals them out to the sockets in turn
#   --gpu-bind, --cpu-bind   none: a task with one visible GPU cannot copy to its neighbours' directly. Each rank takes the GPU
#                        of its number and the cores beside it (pipeline.cluster.host)
bind=()
[ -z "${SLURM_GPUS_ON_NODE:-}" ] || bind=(--gpu-bind=none --cpu-bind=none)
code=0
srun --kill-on-bad-exit=0 --wait=120 --label --export=ALL --cpus-per-task="$cpus" --distribution=block:block "${bind[@]}" \
  "${container[@]}" python -u -m "$train_module" "${run[@]}" || code=$?
trap '' TERM                               # inherited by the commands below: they decide whether the run goes on

# ---- requeue? ----------------------------------------------------------------------------------

case $code in 0 | 2) exit "$code" ;; esac
[ "$train_module" != pipeline.doctor ] || exit "$code"

end() { echo "job $job is not requeued: $*" >&2; exit "$code"; }

# A run of days must not end because slurmctld is restarting: it gets a minute to answer.
ask_slurm() {
  local attempt
  for attempt in {1..6}; do
    if scontrol "$@"; then return 0; fi
    sleep 10
  done
  return 1
}

# A job that Slurm ends is COMPLETING, no longer RUNNING, before its tasks are signalled: that tells scancel
# from other signals, and scontrol would requeue even a cancelled job. At the time limit the reason is
# TimeLimit: the early signal did not suffice, but the job may be requeued. A job that Slurm itself requeued
# has a higher restart count than SLURM_RESTART_COUNT here.
see_that_it_may_go_on() {
  local shown
  shown=$(ask_slurm show job --oneliner "$job") || end "scontrol does not answer. Submit the same command again."
  case $shown in
    *" Requeue=0 "*)
      end "it was submitted with --no-requeue. Submit the same command again, it resumes from the newest checkpoint." ;;
    *" JobState=RUNNING "*) past_time_limit=no ;;
    *" Reason=TimeLimit "*) past_time_limit=yes ;;
    *" Restarts=${SLURM_RESTART_COUNT:-0} "*)
      end "it was cancelled. Submit the same command again, it resumes from the newest checkpoint." ;;
    *) end "Slurm has done so already, after a failed node or by request." ;;
  esac
}

# Where only the container has a Python, the question is a step of the job, of one task. A job past its time limit starts no
# step any more: as many restarts as the question allows without progress are allowed then, however much was saved.
may_restart() {
  local question=(python -m "$restart_module" --exit-code "$code" "${run[@]}") restarts=${SLURM_RESTART_COUNT:-0}
  if [ "${#container[@]}" = 0 ]; then "${question[@]}"; return; fi
  if [ "$past_time_limit" = no ]; then
    srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$cpus" --overlap --export=ALL \
      "${container[@]}" "${question[@]}"
    return
  fi
  [ "$restarts" -lt 3 ] || end "it is past its time limit after $restarts restarts. Submit the same command again."
  echo "restart $((restarts + 1)) of job $job: past its time limit (exit code $code)"
}

see_that_it_may_go_on
may_restart || exit "$code"
see_that_it_may_go_on                      # again: it may have been cancelled meanwhile
ask_slurm requeue "$job" || end "scontrol refused, see above. Submit the same command again."
exit "$code"                               # ignored: Slurm has requeued the job
