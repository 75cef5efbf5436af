#!/bin/bash
# launch/local_cluster.sh up [NODES]     start a Slurm cluster on this machine (default: 2 nodes)
# launch/local_cluster.sh down           cancel its jobs and stop it
#
#   eval "$(launch/local_cluster.sh up 2)"     # afterwards sbatch, squeue and srun use it
#   launch/local_cluster.sh down
#
# It is a real Slurm from the distribution's packages: one slurmctld, one slurmd per node, jobs signed
# by munge. Only the hardware is fake: each node claims 192 CPUs, 2 TB of memory and 8 GPUs, so that the
# production job scripts are accepted unchanged. A job that really needs a GPU fails here; use
# --gpus-per-node=0 on the sbatch line.
#
# As root, each node has its own host name. Otherwise the nodes are called 127.0.1.1, 127.0.1.2, ...
# and share the machine's host name.
#
# PERVIT_CLUSTER_DIR    folder for configuration, keys and logs (default: /tmp/pervit-slurm-UID)
# PERVIT_CLUSTER_PORT   port of slurmctld (default: 16817); node i listens on this port + 100 + i
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin                    # where the daemons are, not always on a user's PATH
default_dir=/tmp/pervit-slurm-$UID
dir=$(realpath -m "${PERVIT_CLUSTER_DIR:-$default_dir}")
port=${PERVIT_CLUSTER_PORT:-16817}
system_conf=/etc/slurm/slurm.conf             # read by Slurm's commands without SLURM_CONF
signature="# Written by launch/local_cluster.sh."
start_timeout=30                              # seconds; normally it takes less than one
export SLURM_CONF=$dir/etc/slurm.conf

say() { echo "local_cluster.sh: $*" >&2; }
die() { echo "error: $*" >&2; exit 2; }

# ---- configuration ----------------------------------------------------------------------------

node_name() { if [ "$private_names" = yes ]; then echo "node$1"; else echo "127.0.1.$1"; fi; }

# Two settings speed up failure tests: a node is down after SlurmdTimeout without an answer, and a requeued
# job may restart once its old credential has expired (cred_expire). KillWait is Slurm's default, so that a
# cancelled job has as much time for its checkpoint as on a real cluster. Job ids start at the port number:
# a job's rendezvous port is derived from its id, and all clusters of a machine share its ports.
write_config() {
  local host i address
  host=$(hostname -s)
  for i in {0..7}; do ln -sf /dev/null "$dir/dev/gpu$i"; done
  echo "Name=gpu File=$dir/dev/gpu[0-7]" > "$dir/etc/gres.conf"
  cat > "$SLURM_CONF" <<CONF
$signature
ClusterName=pervit
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/run/munge.sock,cred_expire=10
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobs.txt
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
FirstJobId=$port
JobRequeue=1
KillWait=30
MinJobAge=600
SlurmctldTimeout=5
SlurmdTimeout=10
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=DEFAULT CPUs=192 RealMemory=2000000 Gres=gpu:8 State=UNKNOWN
CONF
  : > "$dir/etc/hosts"
  for i in $(seq "$nodes"); do
    address=127.0.1.$i
    if [ "$private_names" = yes ]; then host=node$i; fi
    echo "NodeName=$(node_name "$i") NodeHostname=$host NodeAddr=$address Port=$((port + 100 + i))" \
      >> "$SLURM_CONF"
    echo "$address node$i" >> "$dir/etc/hosts"
  done
  cat /etc/hosts >> "$dir/etc/hosts"
  echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefMemPerCPU=100 State=UP" \
    >> "$SLURM_CONF"
}

# This script empties directories and kills by pid file, so it must recognize its own directory.
is_ours() { grep -qxF "$signature" "$SLURM_CONF" 2> /dev/null; }

# ---- processes --------------------------------------------------------------------------------

alive() {                                     # alive PID; false for a zombie
  local state
  read -r _ _ state _ 2> /dev/null < "/proc/$1/stat" && [ "$state" != Z ]
}

running() {                                   # running DAEMON PIDFILE; false for a reused pid
  local pid
  pid=$(cat "$2" 2> /dev/null) && alive "$pid" &&
    [ "$(cat "/proc/$pid/comm" 2> /dev/null)" = "$1" ]
}

running_daemons() {                           # their pids
  local file name
  for file in "$dir"/run/*.pid; do
    name=$(basename "$file" .pid)
    if running "${name%%-*}" "$file"; then cat "$file"; fi
  done
}

# Processes started by a node with its own host name see our file as /etc/hosts.
leftover_processes() {
  local process
  [ -e "$dir/etc/hosts" ] || return 0
  for process in /proc/[0-9]*; do
    if [ "$process/root/etc/hosts" -ef "$dir/etc/hosts" ]; then basename "$process"; fi
  done
}

wait_until() {                                # wait_until SECONDS COMMAND...
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    if [ "$SECONDS" -ge "$deadline" ]; then return 1; fi
    sleep 0.1
  done
}

munge_answers() { munge -n -S "$dir/run/munge.sock" > /dev/null 2>&1; }
nodes_idle()    { [ "$(sinfo --noheader --states=idle --format=%D 2> /dev/null)" = "$nodes" ]; }
no_jobs()       { [ -z "$(squeue --noheader 2> /dev/null)" ]; }
all_ended()     { local pid; for pid in "$@"; do if alive "$pid"; then return 1; fi; done; }
port_taken()    { (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; }

start_node() {
  local name
  name=$(node_name "$1")
  mkdir -p "$dir/spool/$name"
  if [ "$private_names" = yes ]; then
    # The node has its own host name and an /etc/hosts with all nodes; the machine's are unchanged.
    unshare --uts --mount sh -c '
      hostname "$1" && mount --bind "$2/etc/hosts" /etc/hosts && exec slurmd -N "$1" -f "$SLURM_CONF"
    ' sh "$name" "$dir"
  else
    slurmd -N "$name" -f "$SLURM_CONF"
  fi
}

start_daemons() {
  (umask 077; head -c 128 /dev/urandom > "$dir/etc/munge.key")
  munged --key-file="$dir/etc/munge.key" --socket="$dir/run/munge.sock" --num-threads=10 \
    --pid-file="$dir/run/munged.pid" --log-file="$dir/log/munged.log" --seed-file="$dir/run/munge.seed"
  wait_until 5 munge_answers
  slurmctld -f "$SLURM_CONF"
  local i
  for i in $(seq "$nodes"); do start_node "$i"; done
  wait_until "$start_timeout" nodes_idle
}

stop_daemons() {
  local pids                                  # read once: a daemon removes its pid file before it exits
  pids=$(running_daemons)
  if [ -n "$pids" ]; then kill $pids 2> /dev/null || true; fi
  wait_until 10 all_ended $pids || true
  pids="$pids $(leftover_processes)"
  kill -KILL $pids 2> /dev/null || true       # for those that have exited, kill prints an error
  wait_until 5 all_ended $pids || die "of the processes" $pids "some cannot be killed; kill them by hand."
}

# ---- commands ---------------------------------------------------------------------------------

up() {
  nodes=${1:-2}
  [[ $nodes =~ ^[1-9]$|^1[0-6]$ ]] || die "NODES must be 1 to 16, got '$nodes'; try: up 2"
  [[ $port =~ ^[0-9]{4,5}$ ]] && [ "$port" -ge 1024 ] && [ "$port" -le 65000 ] ||
    die "PERVIT_CLUSTER_PORT must be a number from 1024 to 65000, got '$port'; unset it for 16817."
  [[ $dir != *[[:space:]]* ]] ||
    die "the directory '$dir' has a space in its name, which slurm.conf cannot hold; set PERVIT_CLUSTER_DIR to another."
  local tool
  for tool in munged slurmctld slurmd sbatch; do
    command -v "$tool" > /dev/null ||
      die "$tool was not found: Slurm and munge are required; install them: apt-get install slurm-wlm munge"
  done

  if is_ours && running slurmctld "$dir/run/slurmctld.pid"; then
    local present
    present=$(grep -c ' NodeAddr=' "$SLURM_CONF")
    [ "$present" = "$nodes" ] ||
      die "a $present-node cluster is already up in $dir, got a request for $nodes; run 'launch/local_cluster.sh down' first."
    say "the $nodes-node cluster in $dir is up already."
    print_export
    return
  fi

  mkdir -p "$dir" 2> /dev/null && [ -O "$dir" ] ||
    die "$dir must be a directory of your own; set PERVIT_CLUSTER_DIR to another."
  if is_ours; then
    stop_daemons                              # of a cluster that crashed
  elif [ -n "$(ls -A "$dir")" ]; then
    die "$dir must be an empty or new directory; set PERVIT_CLUSTER_DIR to another."
  fi
  if port_taken; then
    die "port $port must be free, but another program uses it; set PERVIT_CLUSTER_PORT to another."
  fi
  umask 022
  chmod a+x "$dir"                            # munge requires that all users can reach its socket
  rm -rf "$dir"/{etc,run,state,spool,dev,log}
  mkdir -p "$dir"/{etc,run,state,spool,dev,log}

  private_names=no
  if unshare --uts --mount true 2> /dev/null; then private_names=yes; fi
  write_config
  # Not "if ! start_daemons": inside a condition bash ignores set -e.
  set +e
  (set -e; start_daemons) > "$dir/log/start.log" 2>&1
  local status=$?
  set -e
  if [ "$status" != 0 ]; then
    stop_daemons
    echo "error: the cluster did not come up; the reason is in $dir/log, see start.log first." >&2
    exit 1
  fi

  # A cluster in another directory stays private to those who have its SLURM_CONF.
  if [ "$UID" = 0 ] && [ "$dir" = "$default_dir" ] && [ ! -e "$system_conf" ] && [ ! -L "$system_conf" ]; then
    mkdir -p "$(dirname "$system_conf")"
    ln -s "$SLURM_CONF" "$system_conf"
  fi
  say "a $nodes-node cluster is up in $dir; stop it with: launch/local_cluster.sh down"
  print_export
}

print_export() { printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"; }

down() {
  if ! is_ours; then
    say "there is no cluster in $dir."
    return
  fi
  if running slurmctld "$dir/run/slurmctld.pid"; then
    local jobs
    jobs=$(squeue --noheader --format=%A || true)
    if [ -n "$jobs" ]; then
      scancel $jobs || true
      wait_until 15 no_jobs || true
    fi
  fi
  stop_daemons
  if [ "$(readlink "$system_conf" || true)" = "$SLURM_CONF" ]; then rm -f "$system_conf"; fi
  say "the cluster in $dir is down."
}

case "${1:-} $#" in
  "-h "* | "--help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" ;;
  "up 1" | "up 2") up "${2:-}" ;;
  "down 1") down ;;
  *) die "the arguments must be 'up [NODES]' or 'down', got '$*'; for example: launch/local_cluster.sh up 2" ;;
esac
