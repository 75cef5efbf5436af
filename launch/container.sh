# launch/container.sh [words of the job]: sourced by train_job.sh and shard_imagenet.slurm; sets PERVIT_SRUN from PERVIT_CONTAINER.
#
#   PERVIT_CONTAINER=/images/pervit.sif    sbatch launch/pervit_t.slurm       Apptainer: a .sif file, a folder, docker://, oras://
#   PERVIT_CONTAINER=/images/pervit.sqsh   sbatch launch/pervit_t.slurm       pyxis and enroot: a .sqsh file, REGISTRY#IMAGE
#   PERVIT_CONTAINER=ghcr.io/me/pervit:1   sbatch launch/pervit_t.slurm       pyxis where srun has it, otherwise Apptainer
#
# In the container are, at the same paths: the repository, PERVIT_DATA and PERVIT_OUTPUT, the absolute paths among the words
# (data.path=/data/imagenet), and those of PERVIT_MOUNTS, separated by commas (/scratch,/data:/data:ro).

case ${1:-} in -h | --help) sed -n '1,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;; esac

if [ -n "${PERVIT_CONTAINER:-}" ]; then
  [ -z "${PERVIT_SRUN:-}" ] || fail "PERVIT_CONTAINER and PERVIT_SRUN must not both be set; unset one."

  has_pyxis() { srun --help 2> /dev/null | grep -q -e --container-image; }
  apptainer=$(command -v apptainer || command -v singularity || true)
  case $PERVIT_CONTAINER in
    *.sif | docker://* | oras://* | library://* | shub://*) runtime=apptainer ;;
    *.sqsh | *.squashfs | *'#'*) runtime=pyxis ;;
    /* | ./* | ../*) runtime=apptainer ;;
    *) if has_pyxis; then runtime=pyxis; else runtime=either; fi ;;
  esac
  image=$PERVIT_CONTAINER
  case $image in
    *://* | *'#'*) ;;
    *.sif | *.sqsh | *.squashfs | /* | ./* | ../*)
      [ -e "$image" ] || fail "PERVIT_CONTAINER must be an existing image, got '$image'; build it as launch/container/ says, or correct it." ;;
    *) [ "$runtime" = pyxis ] || image=docker://$image ;;
  esac
  case $runtime in
    pyxis) has_pyxis || fail "PERVIT_CONTAINER='$PERVIT_CONTAINER' requires pyxis, but srun has no --container-image here;" \
      "make a .sif file of it for Apptainer, or unset it for the virtual environment." ;;
    apptainer) [ -n "$apptainer" ] || fail "PERVIT_CONTAINER='$PERVIT_CONTAINER' requires Apptainer, but neither apptainer nor" \
      "singularity is on the PATH; load its module, or unset it for the virtual environment." ;;
    either) [ -n "$apptainer" ] || fail "PERVIT_CONTAINER='$PERVIT_CONTAINER' requires pyxis or Apptainer, but srun has no --container-image (pyxis), and" \
      "neither apptainer nor singularity is on the PATH; load Apptainer's module, or unset it for the virtual environment." ;;
  esac

  mounts=("$PWD:$PWD")
  mount() {                                  # a folder at its own path, once
    local known
    for known in "${mounts[@]}"; do [ "$known" != "$1:$1" ] || return 0; done
    mounts+=("$1:$1")
  }
  for word in "=${PERVIT_DATA:-}" "=${PERVIT_OUTPUT:-}" "$@"; do
    path=${word#*=}
    [[ $path = /* || -L $path ]] || continue
    while [ ! -d "$path" ]; do path=$(dirname "$path"); done                        # what is bound must be there
    for path in "$path" "$(readlink -f "$path")"; do                                # a link in the repository leads out of it
      case $path in / | "$PWD" | "$PWD"/*) ;; /*) mount "$path" ;; esac
    done
  done
  IFS=, read -r -a more <<< "${PERVIT_MOUNTS:-}"
  for word in ${more[@]+"${more[@]}"}; do
    case $word in *:*) mounts+=("$word") ;; ?*) mount "$word" ;; esac
  done

  joined=$(IFS=,; echo "${mounts[*]}")
  case $image$joined in *[\'\"\\]* | *$'\n'*) fail "PERVIT_CONTAINER or a mounted path has a quote, '$image' and '$joined'; rename it." ;; esac
  if [ "$runtime" = pyxis ]; then
    PERVIT_SRUN="'--container-image=$image' '--container-mounts=$joined' '--container-workdir=$PWD' --no-container-entrypoint"
  else
    PERVIT_SRUN="'$apptainer' exec --nv --bind '$joined' --pwd '$PWD' '$image'"
  fi
fi
