# launch/plan_job.sh CONFIG [dotted.key=value ...] [options of pipeline.plan]: sourced by train_job.sh, where --plan is among its words.
#
# Prints what the job would take, with python -m pipeline.plan, instead of the training:
#
#   bash launch/pervit_m.slurm --plan                                  a login node will do
#   bash launch/train.slurm configs/convit_s.yaml --plan --nodes 2 --gpu a100-80g train.micro_batch_size=64
#   sbatch --nodes=2 launch/pervit_m.slurm --plan train.micro_batch_size=64
#
# Nodes, processes, CPU cores and time limit are those of the job; outside of a job, those of the script's #SBATCH lines. Options given
# here win. What is planned is what the training would be given: the same config, PERVIT_DATA, PERVIT_OUTPUT and words.

case ${1:-} in -h | --help) sed -n '1,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac

[ "$train_module" = pipeline.train ] || fail "--plan requires pipeline.train, got $train_module; leave it out."

asked() { sed -n "s/^#SBATCH --$1=//p" "$0" | head -n 1; }   # in the script that was submitted, of which Slurm runs a copy

nodes=${SLURM_JOB_NUM_NODES:-$(asked nodes)}
processes=${SLURM_NTASKS_PER_NODE:-$(asked ntasks-per-node)}
gpus=$(asked gpus-per-node) limit=$(asked time)
[ -z "${SLURM_JOB_ID:-}" ] || gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}   # such as 8 or h100:8
if [ -n "${SLURM_JOB_START_TIME:-}" ] && [ -n "${SLURM_JOB_END_TIME:-}" ]; then   # --time of sbatch has no variable
  limit=$(((SLURM_JOB_END_TIME - SLURM_JOB_START_TIME) / 60))
elif [ -n "${SLURM_JOB_ID:-}" ]; then   # Slurm of this age does not tell the times
  told=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l 2> /dev/null | head -n 1 || true)
  case $told in [0-9]*) limit=$told ;; esac
fi
plan=(--config "$config" --nodes "${nodes:-1}" --gpus-per-node "${processes:-1}")
[ -z "$limit" ] || plan+=(--time-limit "$limit")
[ "${gpus##*:}" != 0 ] || plan+=(--gpu cpu)
[ -z "${SLURM_CPUS_ON_NODE:-}" ] || plan+=(--cpus "$SLURM_CPUS_ON_NODE")
if [ -z "${SLURM_JOB_ID:-}" ] && [ "${PERVIT_OUTPUT:-}" = runs/ ]; then PERVIT_OUTPUT=runs/$(asked job-name); fi
plan+=(${PERVIT_DATA:+"data.path=$PERVIT_DATA"} ${PERVIT_OUTPUT:+"output_dir=$PERVIT_OUTPUT"})
for word in "$@"; do [ "$word" = --plan ] || plan+=("$word"); done

# Where Python is in a container: as a step of the job, or by the command that runs it.
within=("${container[@]}")
if [ "${#container[@]}" != 0 ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  within=(srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --export=ALL "${container[@]}")
elif [[ ${container[0]:-} = -* ]]; then
  fail "--plan does not take PERVIT_SRUN, got '$PERVIT_SRUN'; submit it with sbatch, or unset PERVIT_SRUN."
fi
exec "${within[@]}" python -m pipeline.plan "${plan[@]}"
