#!/bin/sh
# All stages of a model, one command per line: from Shakespeare's plays to text that resembles them.
#
#   sh recipes/quickstart.sh [section.key=value ...]
#
# `textmill run` does the same in one command. Finished stages are skipped.
set -eu
recipe="$(dirname "$0")/quickstart.yaml"

textmill prepare       "$recipe" "$@"   # turn text into clean documents
textmill fit-tokenizer "$recipe" "$@"   # fit a vocabulary to them
textmill tokenize      "$recipe" "$@"   # turn documents into token ids
textmill train         "$recipe" "$@"   # train, writing checkpoints
textmill check         "$recipe" "$@"   # compare every file with its checksum
textmill run           "$recipe" "$@"   # what is left: evaluate, generate
