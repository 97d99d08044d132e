#!/usr/bin/env bash
# Trains on a Cloud TPU VM or a pod, requested as a queued resource.
#
#   launch/tpu.sh up --name=vit --zone=us-east5-b --type=v6e-16 --spot -- \
#     --config=configs/vit.py:l16 --workdir=gs://BUCKET/l16
#
# `up` does all steps: create, install, run and logs. After a preemption it
# repeats them, and training resumes from WORKDIR. When training is done, it
# deletes the TPU. If training fails, it keeps the TPU for inspection. You may
# stop `up` at any time: training continues, and the same command follows it
# again. The other commands are:
#
#   create    requests the TPU (--type, --zone, --spot)
#   install   copies this code to every host and installs it
#   run       starts training on every host (-- arguments of vit_jax.main)
#   logs      follows the output of one host (--worker=0)
#   status    shows the state of the request, and of training on every host
#   stop      makes training save and end; `run` or `up` resumes it
#   delete    releases the TPU; the hosts' disks are lost
#
# The script uses the Cloud TPU API, which serves v2 to v6e and gets only fixes.
# Google recommends GKE (launch/gke.sh) or Compute Engine; both have TPU7x.
#
# --dry_run only prints the commands. The script needs gcloud with a login and a
# project (--project or `gcloud config set project`). For pods, also run
# `ssh-add ~/.ssh/google_compute_engine`.

# shellcheck disable=SC2016  # the hosts expand variables in single quotes
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=options.sh
source "$(dirname "$0")/options.sh"

name=vit-jax
zone=us-east5-b
type=v6e-16
version=default  # runtime version of the hosts; default: depends on the type
spot=false       # true: a cheaper TPU that may be preempted
project=default  # default: gcloud's project
worker=0         # host whose log `logs` follows
poll_s=30        # seconds between two requests for the state
options=(name zone type version spot project worker poll_s)

case "${1:-}" in
  create | install | run | logs | status | stop | delete | up) command=$1 ;;
  --help)
    show_help
    exit
    ;;
  *)
    refuse "The first word must be up, create, install, run, logs, status," \
      "stop or delete, not '${1:-}'."
    ;;
esac
take_options "${@:2}"
[[ $command != up && $command != run ]] ||
  { need_main_args && need_shipped_config && need_bucket &&
    need_no_local_path; }
[[ $name =~ ^[a-z][-a-z0-9]*$ ]] ||
  refuse "--name=$name: use a-z, 0-9 and -, and begin with a letter."
[[ $worker =~ ^[0-9]+$ ]] || refuse "--worker=$worker is not the number of a host."
[[ $poll_s =~ ^[0-9]+$ ]] || refuse "--poll_s=$poll_s is not a number of seconds."

[[ $type != @(tpu7x|v7x)* ]] ||
  refuse "--type=$type: the Cloud TPU API does not have TPU7x. Use" \
    "launch/gke.sh run --accelerator=tpu7x --topology=... instead."
# https://cloud.google.com/tpu/docs/runtimes
if [[ $version == default ]]; then
  case "$type" in
    v2-* | v3-* | v4-*) version=tpu-ubuntu2204-base ;;
    v5litepod-*) version=v2-alpha-tpuv5-lite ;;
    v5p-*) version=v2-alpha-tpuv5 ;;
    v6e-*) version=v2-alpha-tpuv6e ;;
    *) refuse "The runtime version for --type=$type is unknown." \
      "Give --version=..." ;;
  esac
fi

need_tool gcloud https://cloud.google.com/sdk/docs/install
place=("--zone=$zone")
[[ $project == default ]] || place+=("--project=$project")
tpus=(gcloud compute tpus)

# Runs a shell command on host $1, or on `all`.
remote() {
  run "${tpus[@]}" tpu-vm ssh "$name" "${place[@]}" --quiet \
    "--worker=$1" "--command=$2"
}

create() {
  local tier=()
  if $spot; then tier=(--spot); fi
  run "${tpus[@]}" queued-resources create "$name" \
    "--node-id=$name" "${place[@]}" "--accelerator-type=$type" \
    "--runtime-version=$version" "${tier[@]}"
}

# Prints the state of the request, or nothing if the request does not exist.
state() {
  "${tpus[@]}" queued-resources list "${place[@]}" \
    "--filter=name ~ /$name\$" '--format=value(state.state)'
}

# uv installs a newer Python, because the hosts' Python 3.10 is too old.
install() {
  local archive=vit_jax.tgz
  $dry_run || archive=$(mktemp --suffix=.tgz)
  run tar -czf "$archive" -C "$(dirname "$0")/.." --exclude=__pycache__ \
    setup.py pyproject.toml requirements.txt vit_jax configs &&
    run "${tpus[@]}" tpu-vm scp "$archive" "$name:vit_jax.tgz" \
      "${place[@]}" --quiet --worker=all ||
    return
  $dry_run || rm "$archive"
  remote all "mkdir -p vit_jax && tar -xzf vit_jax.tgz -C vit_jax &&
cd vit_jax &&
python3 -m pip install --quiet --user uv &&
~/.local/bin/uv venv --quiet --seed --allow-existing --python=3.12 env &&
env/bin/pip install --quiet -c requirements.txt -e '.[tpu]'"
}

# Training continues after the ssh connection ends. It holds vit_jax/lock while
# it runs, and writes its exit status to vit_jax/status.
start() {
  local training script
  training=(env/bin/python -m vit_jax.main --distributed "${main_args[@]}")
  # A preempted host sends SIGTERM to all its processes. Because of the trap,
  # the shell then waits for training.
  script=$(quoted "trap : TERM; $(quoted "${training[@]}"); echo \$? > status")
  remote all "cd vit_jax || exit
flock -n lock true ||
{ echo 'error: training runs already; stop it first' >&2; exit 2; }
rm -f status stopped
nohup setsid flock --no-fork lock bash -c $script > log 2>&1 < /dev/null &
echo \$! > pid"
}

logs() {
  remote "$worker" 'cd vit_jax && tail -n 100 -F --pid="$(cat pid)" log'
}

status() {
  run "${tpus[@]}" queued-resources describe "$name" "${place[@]}" \
    '--format=value(state.state)'
  remote all 'cd vit_jax && if flock -n lock true
then echo "not training; last exit status: $(cat status)"
else echo training; fi'
}

stop() {
  remote all 'cd vit_jax && touch stopped &&
{ flock -n lock true || pkill -TERM -P "$(cat pid)"; }'
}

delete() {
  run "${tpus[@]}" queued-resources delete "$name" "${place[@]}" --force --quiet
}

# Waits until all hosts accept ssh. New hosts refuse it for a while.
wait_for_hosts() {
  local _
  for _ in {1..20}; do
    if remote all true; then return; fi
    sleep "$poll_s"
  done
  return 1
}

# Starts training unless it runs already, and follows its log.
train() {
  wait_for_hosts || return
  local now='' _
  # If the connection is lost, ask again, because `install` must not overwrite
  # the code while training runs.
  for _ in {1..20}; do
    now=$(remote 0 'if cd vit_jax 2> /dev/null && ! flock -n lock true
then echo running; else echo free; fi') && break
    sleep "$poll_s"
  done
  case "$now" in
    *running*) echo 'Training runs already.' >&2 ;;
    *free*) install && start || return ;;
    *) return 1 ;;
  esac
  logs || true  # if the connection is lost, `up` looks at the state
}

up() {
  if $dry_run; then
    for command in create install start logs delete; do "$command"; done
    return
  fi
  local now ended _
  # What is known about the request: '' (nothing), seen, or preempted.
  local known=''
  state > /dev/null  # ends here if gcloud fails; the loop would try again
  while true; do
    now=$(state || echo unknown)
    case "$now" in
      '')
        case "$known" in
          seen)
            echo "error: $name was deleted. It is not requested again." >&2
            exit 1
            ;;
          preempted) create || { sleep "$poll_s" && continue; } ;;
          *) create ;;
        esac
        ;;
      SUSPENDED)
        echo 'Preempted: requesting the TPU again.' >&2
        known=preempted
        delete || sleep "$poll_s"  # this request never becomes active again
        continue
        ;;
      DELETING) echo "$name is $now." >&2 ;;
      FAILED)
        echo 'error: the request failed; `delete` it.' >&2
        exit 1
        ;;
      ACTIVE)
        known=seen
        if train; then
          ended=$(remote 0 'cat vit_jax/status' || true)
          case "$ended" in
            0)
              for _ in {1..5}; do
                if delete; then return; fi
                sleep "$poll_s"
              done
              leave 0
              ;;
            75) if remote 0 'test -e vit_jax/stopped'; then leave 75; fi ;;
          esac
        else
          ended=1
        fi
        # After a preemption, training on the other hosts fails before the state
        # shows the preemption.
        sleep "$((4 * poll_s))"
        now=$(state || true)
        if [[ -n $ended && $ended != 75 && $now == ACTIVE ]]; then
          leave "$ended"
        fi
        continue
        ;;
      *)
        if [[ $now != unknown ]]; then known=seen; fi
        echo "$name is $now." >&2
        ;;
    esac
    sleep "$poll_s"
  done
}

# Ends with status $1, or 1 if $1 is 0, because the TPU still costs money.
leave() {
  echo "Installing or training ended with status $1. The TPU still costs money." \
    "Delete it: launch/tpu.sh delete --name=$name ${place[*]}" >&2
  exit "$(($1 ? $1 : 1))"
}

case "$command" in
  run) start ;;
  *) "$command" ;;
esac
