#!/usr/bin/env bash
# From a fresh clone to a comparison: set up, build, train, compare on a small fictional world.
# A second call goes on where the first one stopped, and only shows the table when all is done.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ ! -d samples/world ]; then
    coinrag world samples/world --train 160 --dev 50
fi
coinrag build quickstart
coinrag train quickstart train.resume=true
coinrag compare quickstart
