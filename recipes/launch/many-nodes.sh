#!/usr/bin/env bash
# Several machines with all their GPUs; start the same line on each of them within a few minutes:
#   NODES=4 HEAD=first-machine bash many-nodes.sh CONFIG.yaml [section.key=value ...]
# HEAD is a machine that all others can reach, PORT a free port on it. All need the same folders of run and tokens.
# If a machine is lost, the others report the missing rank and exit; the same line resumes from the newest checkpoint.
set -uo pipefail
[ $# -gt 0 ] && [ -n "${NODES:-}" ] && [ -n "${HEAD:-}" ] || {
  echo "usage: NODES=4 HEAD=first-machine bash many-nodes.sh CONFIG.yaml [section.key=value ...]" >&2
  exit 2
}

where='import sys; from textmill.where import open_where; print(open_where(sys.argv[1], sys.argv[2:]).config.folder_of("train"))'
run=$(python -c "$where" "$@") || exit 2

torchrun --nnodes "$NODES" --nproc-per-node "${RANKS:-gpu}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${JOB:-textmill}" \
  -m textmill train "$@"
code=$?
[ $code -ne 0 ] && [ -f "$run/stopped.json" ] && exit 75
exit $code
