# launch/train_job.sh CONFIG [dotted.key=value ...]: what pervit_{t,s,m}.slurm have in common.
#
# Sourced by a Slurm batch script in the repository root; runs on the job's first node and starts
# one task for each GPU. PERVIT_DATA and PERVIT_OUTPUT are set by the batch script.
#
# The job ends with srun's exit code, the highest among its tasks: 0 only when all succeeded. A task
# that is ended because another one failed counts as 143, so the log names the one that failed first.

fail() { echo "error: $*" >&2; exit 2; }

[ -n "${SLURM_JOB_ID:-}" ] ||
  fail "no Slurm job was found, this script is part of one; submit it: sbatch launch/pervit_t.slurm"

config=$1
shift

# All nodes must see the virtual environment, so it lives beside the code on the shared disk.
venv=${PERVIT_VENV:-.venv}
if [ -f "$venv/bin/activate" ]; then
  source "$venv/bin/activate"
elif [ -n "${PERVIT_VENV:-}" ]; then
  fail "PERVIT_VENV is '$venv', which has no bin/activate; set it to a virtual environment or unset it."
fi
command -v python > /dev/null ||
  fail "no python was found in $venv or on the PATH, one with this package is needed; run: make install"

# The tasks meet at the first node. The port follows from the job id, so that jobs which share a
# node do not meet each other, and from the restart count, so that a requeued job does not meet a
# task of its earlier life. It stays below 32768, where ports for outgoing connections begin.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + (SLURM_JOB_ID + 1000 * ${SLURM_RESTART_COUNT:-0}) % 10000))
export MASTER_ADDR MASTER_PORT

# Without this every task would start as many compute threads as the node has cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, number of tasks: $SLURM_NTASKS," \
  "meeting at $MASTER_ADDR:$MASTER_PORT"

# pipeline.train reads its rank from Slurm's variables: no ssh, no torchrun.
#   --kill-on-bad-exit   when one task fails the others would wait for it until the time limit
#   --export=ALL         the tasks keep this environment even if sbatch was given --export=NONE
#   --cpus-per-task      srun has ignored the batch script's setting since Slurm 22.05
# Later overrides win, so the ones from the sbatch line come last.
srun --kill-on-bad-exit=1 --label --export=ALL --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -u -m pipeline.train --config "$config" \
  "data.path=$PERVIT_DATA" "output_dir=$PERVIT_OUTPUT" "$@"
