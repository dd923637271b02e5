#!/usr/bin/env bash
# One run over several machines by DeepSpeed's launcher: it reaches each host by ssh, with the same folder and Python on all of them.
#
#   bash deepspeed-hosts.sh HOSTFILE CONFIG.yaml [section.key=value ...]
#
# A hostfile has a line a machine, with its number of GPUs:
#
#   worker-1 slots=8
#   worker-2 slots=8
#
# Prepare and tokenize first, on one machine: textmill run CONFIG.yaml train.steps=1, or the commands one by one.
set -uo pipefail
[ $# -gt 1 ] || {
  echo "usage: bash deepspeed-hosts.sh HOSTFILE CONFIG.yaml [section.key=value ...]" >&2
  exit 2
}
hosts=$1
shift
exec deepspeed --hostfile "$hosts" --no_local_rank --module textmill train "$@" engine.kind=deepspeed
