#!/usr/bin/env bash
# One machine with all its GPUs:
#   bash one-node.sh CONFIG.yaml [section.key=value ...]
# RANKS=2 starts two processes instead; with engine.device=cpu this works without a GPU.
# The same command resumes from the newest checkpoint. Exit code 75: stopped before the end, safe to resume.
set -uo pipefail
[ $# -gt 0 ] || { echo "usage: bash one-node.sh CONFIG.yaml [section.key=value ...]" >&2; exit 2; }

where='import sys; from textmill.where import open_where; print(open_where(sys.argv[1], sys.argv[2:]).config.folder_of("train"))'
run=$(python -c "$where" "$@") || exit 2

torchrun --standalone --nproc-per-node "${RANKS:-gpu}" -m textmill train "$@"
code=$?
# torchrun exits with 1 for any error; stopped.json shows that the run can be resumed.
[ $code -ne 0 ] && [ -f "$run/stopped.json" ] && exit 75
exit $code
