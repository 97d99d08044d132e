# Functions with which the launch scripts parse options and run commands.
#
# A script sets default values of its options, names them in `options` and calls
# `take_options "$@"`. Then --NAME=VALUE sets an option. An option whose default
# is `false` is a switch: --NAME sets it to `true`. Arguments after -- are for
# vit_jax.main and go into `main_args` unchanged.
# shellcheck shell=bash disable=SC2034,SC2086,SC2154  # scripts share these variables

main_args=()
dry_run=false

refuse() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# Prints the comment at the top of the script.
show_help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

take_options() {
  local option known=" ${options[*]} dry_run "
  while (($#)); do
    case "$1" in
      --help)
        show_help
        exit
        ;;
      --)
        main_args=("${@:2}")
        return
        ;;
    esac
    option=${1%%=*} option=${option#--}
    if [[ $1 != --?* || $option == *' '* || $known != *" $option "* ]]; then
      refuse "$1 is not an option. Use$(printf ' --%s' $known) or --help;" \
        "arguments of vit_jax.main go after --."
    fi
    if [[ ${!option} != true && ${!option} != false ]]; then
      [[ $1 == *=?* ]] || refuse "--$option needs a value: --$option=..."
      printf -v "$option" %s "${1#*=}"
    elif [[ $1 == "--$option" ]]; then
      printf -v "$option" true
    else
      refuse "--$option takes no value."
    fi
    shift
  done
}

# Sets `config` and `workdir`. Refuses a missing flag here, because vit_jax.main
# would fail only after the job has waited in a queue.
need_main_args() {
  local arg before=''
  local -A found=([config]='' [workdir]='')
  for arg in "${main_args[@]}"; do
    if [[ $arg =~ ^--?(config|workdir)=(.*)$ ]]; then
      found[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}
    elif [[ $before =~ ^--?(config|workdir)$ ]]; then
      found[${BASH_REMATCH[1]}]=$arg
    fi
    before=$arg
  done
  for arg in config workdir; do
    [[ -n ${found[$arg]} ]] ||
      refuse "vit_jax.main needs --$arg=...; give it after --."
  done
  config=${found[config]}
  workdir=${found[workdir]}
  # Shells do not expand ~ after --workdir=, but vit_jax.main does.
  [[ $workdir != \~/* ]] || workdir=$HOME/${workdir#\~/}
}

# Refuses a config file outside of configs/, because the hosts do not get it.
need_shipped_config() {
  local file=${config%%:*}
  [[ $file != */* && $file != *.py || ${file#./} == configs/?*.py ]] ||
    refuse "--config=$config: the hosts get only vit_jax/ and configs/." \
      "Put the file into configs/."
}

# Refuses most paths of data and checkpoints on this machine, because the hosts
# do not get them. A path that begins with / is accepted: the hosts may have
# mounted it. The check misses paths with ~, =, commas or spaces.
need_no_local_path() {
  local arg word words before=''
  for arg in "${main_args[@]}"; do
    IFS=$' \n\'"=,:()' read -rd '' -a words <<< "$arg" || true
    for word in "${words[@]}"; do
      [[ $word == /* || ${word#./} == @(configs|vit_jax)/* ]] && continue
      # A word without / or . rarely means a file, unless it is a checkpoint.
      if [[ $word == @(.|..)/* ]] || [[ -e $word &&
        ($word == *[./]* || $before == ?(*.)@(init|teacher)) ]]; then
        refuse "The hosts do not have $word. Give a path in a bucket, or the" \
          "absolute path of a folder or file that all hosts have mounted."
      fi
      before=$word
    done
  done
}

need_bucket() {
  [[ $workdir == gs://?* ]] ||
    refuse "--workdir=$workdir would be lost with the machine. Give a folder" \
      "in a bucket: --workdir=gs://BUCKET/FOLDER."
}

# Refuses to run if a tool is missing. A dry run does not need the tool.
need_tool() {
  $dry_run || command -v "$1" > /dev/null ||
    refuse "$1 is not installed. See $2."
}

# Prints words with quotes, so that a shell reads the same words again.
quoted() {
  local word quote=\' escaped="'\\''" line=''
  for word in "$@"; do
    if [[ ! $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
      word=\'${word//"$quote"/"$escaped"}\'
    fi
    line+=" $word"
  done
  printf '%s\n' "${line:1}"
}

# Runs a command; with --dry_run, only prints it.
run() {
  if $dry_run; then quoted "$@"; else "$@"; fi
}
