#!/usr/bin/env bash
# One run on several machines with DeepSpeed's launcher, which uses ssh; all need the same folder and Python.
#
#   bash deepspeed-hosts.sh HOSTFILE CONFIG.yaml [section.key=value ...]
#
# The hostfile has one line per machine, with its number of GPUs:
#
#   worker-1 slots=8
#   worker-2 slots=8
#
# Prepare and tokenize first on one machine, for example with: textmill run CONFIG.yaml train.steps=1
set -uo pipefail
[ $# -gt 1 ] || {
  echo "usage: bash deepspeed-hosts.sh HOSTFILE CONFIG.yaml [section.key=value ...]" >&2
  exit 2
}
hosts=$1
shift
exec deepspeed --hostfile "$hosts" --module textmill train "$@" engine.kind=deepspeed
