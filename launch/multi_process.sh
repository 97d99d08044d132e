#!/usr/bin/env bash
# Tries out training with several processes, on the CPU of this machine.
#
#   launch/multi_process.sh -- --config=configs/digits.py --workdir=runs/two
#   launch/multi_process.sh --processes=4 --devices=2 -- ...
#   launch/multi_process.sh --dry_run -- ...     only prints the commands
#
# The processes form one mesh, like the hosts of a pod. Each process writes to
# WORKDIR/processes/ID.log, and process 0 to the terminal too. A new start
# overwrites the logs of its processes. If one process fails alone, the others
# end with status 69, or are killed after --grace_s seconds. The script ends with
# the status of the first process that failed. On Ctrl-C or SIGTERM, training
# saves and ends with status 75. The same command resumes, even with another
# number of processes.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=options.sh
source "$(dirname "$0")/options.sh"

processes=2
devices=4   # number of devices per process
port=free   # port on which process 0 waits for the others; free: any free port
grace_s=60  # seconds after a failure until the other processes are killed
options=(processes devices port grace_s)
take_options "$@"
need_main_args
for name in processes devices grace_s; do
  [[ ${!name} =~ ^[1-9][0-9]*$ ]] ||
    refuse "--$name=${!name} is invalid. It must be a whole number above 0."
done
[[ $workdir != *://* ]] ||
  refuse "--workdir=$workdir: this script needs a local folder."

if [[ $port == free ]]; then
  port=$(python -c 'import socket
with socket.create_server(("localhost", 0)) as s: print(s.getsockname()[1])')
fi

# Sets `command` to the command that starts process $1.
command_of() {
  local cpus=--xla_force_host_platform_device_count=$devices
  command=(env "JAX_PROCESS_ID=$1" "JAX_NUM_PROCESSES=$processes"
    "JAX_COORDINATOR_ADDRESS=localhost:$port" JAX_PLATFORMS=cpu
    JAX_CPU_COLLECTIVES_IMPLEMENTATION=gloo
    "XLA_FLAGS=${XLA_FLAGS:+$XLA_FLAGS }$cpus"
    python -m vit_jax.main --distributed "${main_args[@]}")
}

if $dry_run; then
  for ((i = 0; i < processes; i++)); do
    command_of "$i"
    quoted "${command[@]}"
  done
  exit
fi

mkdir -p "$workdir/processes"
# With -i, tee ignores Ctrl-C, after which process 0 still writes.
exec {tee}> >(exec tee -i "$workdir/processes/0.log")
tee_pid=$!
pids=()
trap 'kill -TERM "${pids[@]}" 2> /dev/null || true' INT TERM
for ((i = 0; i < processes; i++)); do
  command_of "$i"
  if ((i == 0)); then
    "${command[@]}" >&"$tee" 2>&1 {tee}>&- &
  else
    "${command[@]}" > "$workdir/processes/$i.log" 2>&1 {tee}>&- &
  fi
  pids+=($!)
done

status=0
while ((${#pids[@]})); do
  sleep 0.2 || true  # Ctrl-C interrupts sleep too
  for i in "${!pids[@]}"; do
    if kill -0 "${pids[i]}" 2> /dev/null; then continue; fi
    wait "${pids[i]}" && one=0 || one=$?
    unset 'pids[i]'
    if ((one && !status)); then
      status=$one
      failed_s=$SECONDS
    fi
  done
  # Kills processes that do not notice the failure.
  if ((status && ${#pids[@]} && SECONDS > failed_s + grace_s)); then
    kill -KILL "${pids[@]}" 2> /dev/null || true
  fi
done
exec {tee}>&-
wait "$tee_pid" || true  # tee fails if the disk is full
((!status)) ||
  echo "Status $status. Each process has a log in $workdir/processes." >&2
exit "$status"
