#!/usr/bin/env bash
# Trains on all devices of this machine, in one process.
#
#   launch/local.sh -- --config=configs/digits.py --workdir=runs/digits
#   launch/local.sh --dry_run -- ...     only prints the command
#
# Signals and exit statuses are the same as for vit_jax.main: on SIGTERM,
# training saves and ends with status 75. The script does not restart training.
# To resume, run the same command again.

set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=options.sh
source "$(dirname "$0")/options.sh"

options=()
take_options "$@"
need_main_args
$dry_run || exec python -m vit_jax.main "${main_args[@]}"
run python -m vit_jax.main "${main_args[@]}"
