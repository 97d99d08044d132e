#!/usr/bin/env bash
# Trains on TPU slices of a Google Kubernetes Engine cluster, as a JobSet.
#
#   launch/gke.sh image --image=us-docker.pkg.dev/PROJECT/REPOSITORY/vit_jax
#   launch/gke.sh run --name=l16 --image=... --topology=4x4 -- \
#     --config=configs/vit.py:l16 --workdir=gs://BUCKET/l16
#
#   image     builds the container image of this code and uploads it
#   run       starts or resumes training; arguments of vit_jax.main follow --
#   logs      follows the output of one host of the first slice (--worker=0)
#   status    shows the state of the JobSet and its hosts
#   stop      saves and releases the TPU; `run` with the same options resumes
#   delete    deletes the JobSet; afterwards its name can be used again
#
# If a host is preempted or fails, training restarts and resumes, at most
# --restarts times. After status 2 (bad input) or 65 (diverged) it does not
# restart. --slices=N trains on N slices of the topology, each in its own node
# pool. --accelerator is the kind of TPU, by default tpu-v6e-slice. --chips is
# the number of chips per host, by default 4. --nodes is spot, flex-start or
# reservation=NAME. --queue is a queue of Kueue. --data_bucket=NAME mounts a
# bucket read-only at /data, with Cloud Storage FUSE. --service_account is the
# Kubernetes account that may use the buckets. --dry_run only prints the
# commands.
#
# The script needs kubectl, and a cluster with TPU nodes and JobSet. `image`
# needs docker.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=options.sh
source "$(dirname "$0")/options.sh"

name=vit-jax
image=''
# Other values: tpu7x, tpu-v5p-slice, tpu-v5-lite-podslice, tpu-v4-podslice.
accelerator=tpu-v6e-slice
topology=4x4
slices=1                   # number of slices with that topology
chips=4                    # chips per host
nodes=''                   # empty: on demand
queue=''                   # empty: does not use Kueue
data_bucket=''             # empty: does not mount /data
service_account=default    # service account in Kubernetes
restarts=20
worker=0                   # host whose log `logs` follows
options=(name image accelerator topology slices chips nodes queue data_bucket
  service_account restarts worker)

case "${1:-}" in
  image | run | logs | status | stop | delete) command=$1 ;;
  --help)
    show_help
    exit
    ;;
  *)
    refuse "The first word must be image, run, logs, status, stop or delete," \
      "not '${1:-}'."
    ;;
esac
take_options "${@:2}"
# Pods are called NAME-slice-SLICE-HOST-abcde, with at most 63 characters.
[[ $name =~ ^[a-z]([-a-z0-9]{0,40}[a-z0-9])?$ ]] ||
  refuse "--name=$name: use a-z, 0-9 and -, begin with a letter, end with a" \
    "letter or digit, at most 42 characters."
for word in accelerator service_account ${queue:+queue}; do
  [[ ${!word} =~ ^[a-z0-9][-a-z0-9.]*$ ]] ||
    refuse "--$word=${!word} is not a name in Kubernetes: use a-z, 0-9, . and" \
      "-, and begin with a letter or digit."
done
for number in slices chips restarts worker; do
  [[ ${!number} =~ ^[0-9]+$ ]] ||
    refuse "--$number=${!number} is not a whole number."
done
((slices)) || refuse "--slices=0: give 1 or more."
if [[ $nodes =~ ^(spot|flex-start)$ ]]; then
  selector="cloud.google.com/gke-$nodes: \"true\""
elif [[ $nodes =~ ^reservation=([a-z]([-a-z0-9]*[a-z0-9])?)$ ]]; then
  selector="cloud.google.com/reservation-name: \"${BASH_REMATCH[1]}\""
elif [[ -n $nodes ]]; then
  refuse "--nodes=$nodes: give spot, flex-start or reservation=NAME."
else
  selector='# any node'
fi
annotations='{}' mount='# no bucket' volume='# no bucket'
if [[ -n $data_bucket ]]; then
  [[ $data_bucket =~ ^[a-z0-9][-a-z0-9_.]*$ ]] ||
    refuse "--data_bucket=$data_bucket: give the bucket's name, without gs://."
  annotations='{gke-gcsfuse/volumes: "true"}'
  mount='- {name: data, mountPath: /data, readOnly: true}'
  volume='- {name: data, csi: {driver: gcsfuse.csi.storage.gke.io,'
  volume+=' readOnly: true, volumeAttributes: {mountOptions: implicit-dirs,'
  volume+=" bucketName: \"$data_bucket\"}}}"
fi
if [[ $command == run || $command == image ]]; then
  [[ $image =~ ^[a-z0-9][A-Za-z0-9._/:@-]*$ ]] ||
    refuse "--image=$image is not an image. Example:" \
      us-docker.pkg.dev/PROJECT/REPOSITORY/vit_jax
fi
pods="jobset.sigs.k8s.io/jobset-name=$name"
if [[ $command == image ]]; then
  need_tool docker https://docs.docker.com/engine/install
else
  need_tool kubectl https://kubernetes.io/docs/tasks/tools
fi

# Prints words as a YAML list. Doubles $, because Kubernetes replaces $(NAME) in
# arguments and reads $$ as $.
yaml_list() {
  local word list=''
  for word in "$@"; do
    [[ $word != *[[:cntrl:]]* ]] ||
      refuse "An argument has a control character: ${word@Q}"
    word=${word//\\/\\\\} word=${word//\"/\\\"} word=${word//\$/\$\$}
    list+=", \"$word\""
  done
  printf '[%s]' "${list:2}"
}

manifest() {
  local hosts args key text
  [[ $topology =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] ||
    refuse "--topology=$topology is not a shape such as 4x4 or 2x2x4."
  ((hosts = ${topology//x/*}))
  ((chips && hosts % chips == 0)) ||
    refuse "--topology=$topology has $hosts chips, which is not a multiple" \
      "of --chips=$chips, the chips per host."
  ((hosts /= chips))
  ((slices == 1 || hosts > 1)) ||
    refuse "--slices=$slices: --topology=$topology with --chips=$chips has" \
      "one host, and slices of one host cannot be joined. Give a larger topology."
  args=$(yaml_list "${main_args[@]}") || exit
  local -A words=([NAME]=$name [IMAGE]=$image [ACCELERATOR]=$accelerator
    [TOPOLOGY]=$topology [SLICES]=$slices [CHIPS]=$chips [HOSTS]=$hosts
    [RESTARTS]=$restarts [SERVICE_ACCOUNT]=$service_account [NODES]=$selector
    [LABELS]="{${queue:+kueue.x-k8s.io/queue-name: \"$queue\"}}"
    [ANNOTATIONS]=$annotations [MOUNT]=$mount [VOLUME]=$volume [ARGS]=$args)
  text=$(< "$(dirname "$0")/jobset.yaml")
  # ARGS come last, so that words in the arguments are not replaced.
  for key in NAME IMAGE ACCELERATOR TOPOLOGY SLICES CHIPS HOSTS RESTARTS \
    SERVICE_ACCOUNT NODES LABELS ANNOTATIONS MOUNT VOLUME ARGS; do
    text=${text//__"$key"__/"${words[$key]}"}
  done
  printf '%s\n' "$text"
}

case "$command" in
  image)
    root=$(dirname "$0")/..
    run docker build --platform=linux/amd64 \
      "--file=$root/launch/Dockerfile" "--tag=$image" "$root"
    run docker push "$image"
    ;;
  run)
    need_main_args
    need_shipped_config
    need_bucket
    need_no_local_path
    text=$(manifest)
    if $dry_run; then
      printf "kubectl apply -f - <<'EOF'\n%s\nEOF\n" "$text"
    else
      # `kubectl apply` cannot restart a JobSet that has ended.
      ended=$(kubectl get "jobset/$name" --ignore-not-found \
        '--output=jsonpath={.status.conditions[?(@.status=="True")].type}')
      [[ ! " $ended " =~ ' '(Completed|Failed)' ' ]] ||
        refuse "The JobSet $name has ended (${BASH_REMATCH[1]}). To resume," \
          "first run launch/gke.sh delete --name=$name, then this command again."
      kubectl apply -f - <<< "$text"
    fi
    ;;
  logs)
    host="jobset.sigs.k8s.io/job-index=0"
    host+=",batch.kubernetes.io/job-completion-index=$worker"
    run kubectl logs --follow --tail=100 "--selector=$pods,$host"
    ;;
  status)
    run kubectl get "jobset/$name"
    run kubectl get pods "--selector=$pods" --output=wide
    ;;
  stop)
    run kubectl patch "jobset/$name" --type=merge \
      '--patch={"spec": {"suspend": true}}'
    ;;
  delete) run kubectl delete "jobset/$name" ;;
esac
