#!/bin/sh
# launch/container/install.sh system | packages | project: the steps of an image, for the Dockerfile and pervit.def alike.
#
#   system     compilers for Triton and torch.compile, Python, tini             as root, on Debian or Ubuntu
#   packages   everything that the project needs, at the versions of constraints.txt, into /opt/venv
#   project    the project itself
#
# The two last are run in a folder with pyproject.toml and constraints.txt. PERVIT_EXTRAS, if set, replaces the list of extras,
# and PERVIT_VENV the virtual environment's place:
#
#   PERVIT_EXTRAS="insight wandb" launch/container/install.sh packages
#   launch/container/install.sh project
set -eu

venv=${PERVIT_VENV:-/opt/venv}
extras=${PERVIT_EXTRAS:-demo insight parquet hub remote}

case ${1:-} in
  -h | --help) sed -n '1d; /^[^#]/q; s/^# \{0,1\}//p' "$0" ;;
  system)
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    # procps: DeepSpeed and people look for processes; git: the commit of a mounted repository is recorded with each run
    apt-get install --yes --no-install-recommends ca-certificates g++ gcc git libc6-dev procps python3 python3-dev python3-venv tini
    rm -rf /var/lib/apt/lists/*
    ;;
  packages)
    python3 -m venv "$venv"
    list=$(mktemp)
    # shellcheck disable=SC2086  # a list of words
    "$venv/bin/python" - $extras > "$list" <<'PYTHON'
import sys

try:
    import tomllib
except ImportError:  # before Python 3.11
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], sep="\n")
for extra in sys.argv[1:]:
    print(*project["optional-dependencies"][extra], sep="\n")
PYTHON
    "$venv/bin/pip" install --no-cache-dir --constraint constraints.txt --requirement "$list"
    rm "$list"
    ;;
  project) "$venv/bin/pip" install --no-cache-dir --no-deps . ;;
  *) echo "error: the argument must be system, packages or project, got '${1:-}'; see launch/container/install.sh --help." >&2; exit 2 ;;
esac
