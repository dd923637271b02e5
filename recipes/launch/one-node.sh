#!/usr/bin/env bash
# One machine, all its GPUs:
#   bash one-node.sh CONFIG.yaml [section.key=value ...]
# RANKS=2 starts two processes instead; with engine.device=cpu that is the way to try it without a GPU.
# The same command goes on from the newest checkpoint. Exit code 75 says that there is more to do, and that it may.
set -uo pipefail
[ $# -gt 0 ] || { echo "usage: bash one-node.sh CONFIG.yaml [section.key=value ...]" >&2; exit 2; }

where='import sys; from textmill.where import open_where; print(open_where(sys.argv[1], sys.argv[2:]).config.folder_of("train"))'
run=$(python -c "$where" "$@") || exit 2

torchrun --standalone --nproc-per-node "${RANKS:-gpu}" -m textmill train "$@"
code=$?
# torchrun makes 1 of every other code; what the run says of itself stands in its folder.
[ $code -ne 0 ] && [ -f "$run/stopped.json" ] && exit 75
exit $code
