#!/bin/sh
# The whole life of a model, a line a verb: from Shakespeare's plays to text that reads like them.
#
#   sh recipes/quickstart.sh [section.key=value ...]
#
# `textmill run` does all of it; the verbs below are the same work one by one. Each is quick when done already.
set -eu
recipe="$(dirname "$0")/quickstart.yaml"

textmill prepare       "$recipe" "$@"   # text in, clean documents out
textmill fit-tokenizer "$recipe" "$@"   # a vocabulary for them
textmill tokenize      "$recipe" "$@"   # documents in, token ids out
textmill train         "$recipe" "$@"   # token ids in, checkpoints out
textmill check         "$recipe" "$@"   # every bit where it should be
textmill run           "$recipe" "$@"   # what is left: measure it, sample from it
