#!/usr/bin/env bash
# A training on the GPUs of several machines over ssh; see launch/TRAINING.md.
#
#   launch/multinode.sh "host0 host1" 8 zero3 RECIPE [section.key=value ...]
#
# Hosts, ranks on each, and how they share the model. Each host has this repository, its .venv and
# the recipe's files under the same paths, and is reached without a password. The first one's port
# COINRAG_PORT (29500) must be open to the others. Ctrl-C hangs up on all of them, and they save
# their state before they end.
set -euo pipefail

read -ra hosts <<< "$1"
processes=$2
sharding=$3
shift 3

pids=()
for rank in "${!hosts[@]}"; do
    command=("${COINRAG_ENV:-$PWD/.venv}/bin/coinrag" train "$@"
        --processes "$processes" --sharding "$sharding"
        --nodes "${#hosts[@]}" --node-rank "$rank" --head "${hosts[0]}:${COINRAG_PORT:-29500}")
    # With a terminal of its own a remote command ends when ssh does.
    ssh -tt "${hosts[$rank]}" "cd $(printf '%q' "$PWD") && exec $(printf '%q ' "${command[@]}")" \
        < /dev/null &
    pids+=($!)
done
trap 'kill "${pids[@]}" 2> /dev/null || true' INT TERM

status=0
for pid in "${pids[@]}"; do
    ended=0
    wait "$pid" || ended=$?
    # A signal ends the waiting, not what is waited for.
    while kill -0 "$pid" 2> /dev/null; do
        ended=0
        wait "$pid" || ended=$?
    done
    if ((ended)); then status=$ended; fi
done
exit "$status"
