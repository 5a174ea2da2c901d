#!/usr/bin/env bash
# Answers and a trained drafter within ten minutes on one GPU. Everything is resumed when it is run again.
#   OUT=gpu-run KIND=dspark drafters/recipes/gpu.sh [flags of `dspark train`]
# For a machine without a GPU: DEVICE=cpu, and smaller numbers.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
OUT=${OUT:-gpu-run}                        # data, run and drafter are folders in it
KIND=${KIND:-dspark}                       # a recipe of this folder
TARGET=${TARGET:-demo}
DEVICE=${DEVICE:-cuda}
PROMPTS=${PROMPTS:-builtin}                # words of --prompts
EXCLUDE=${EXCLUDE:-}                       # files of evaluation prompts
COUNT=${COUNT:-12000}
ROWS=${ROWS:-768}
PREPARE_FLAGS=${PREPARE_FLAGS:-}
PREPARE_MINUTES=${PREPARE_MINUTES:-3}
TRAIN_MINUTES=${TRAIN_MINUTES:-5.5}

# shellcheck disable=SC2086  # lists of words
"$PYTHON" -m services.cli prepare --target "$TARGET" --data "$OUT/data" --device "$DEVICE" --prompts $PROMPTS \
    ${EXCLUDE:+--exclude $EXCLUDE} --count "$COUNT" --rows "$ROWS" --minutes "$PREPARE_MINUTES" $PREPARE_FLAGS
"$PYTHON" -m services.cli train --recipe "drafters/recipes/$KIND.yaml" --target "$TARGET" --data "$OUT/data" \
    --run "$OUT/run-$KIND" --device "$DEVICE" --minutes "$TRAIN_MINUTES" --out "$OUT/drafter-$KIND" \
    --positions-per-step "${POSITIONS:-16384}" "$@"
