#!/bin/sh
# What a GPU is asked for, in parts of less than ten minutes: equality of the executors, speed by group of works, one published
# cell by each way to train it. Every part writes its file as it goes; a part that was stopped is continued by the same command.
#   sh benchmarks/gpu.sh FOLDER [PART...]      parts: equality W1 ResNet-18 growth bf16 evaluation state seeds cell; default: all
# Fashion-MNIST, which `cell` needs, is looked for in $FEDREPRO_DATA.
set -u
out=${1:?folder for the results}; shift; failed=0
cd "$(dirname "$0")/.." && mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
export PYTHONPATH=$PWD
[ $# -gt 0 ] || set -- equality W1 ResNet-18 growth bf16 evaluation state seeds cell
for part in "$@"; do
  case $part in
    equality) python -m benchmarks.equal --device cuda --minutes 8 --json "$out/equality-cuda.json" ;;
    cell) for how in sequential stacked; do
            timeout 180 python -m fedrepro run fedccfa/table1 --tier paper --methods FedAvg --seeds 1 --device cuda \
              --datasets "Fashion-MNIST, 20 clients" --executor $how --results "$out/$how" || failed=1
          done ;;
    *) timeout 570 python -m benchmarks --device cuda --only "$part" --json "$out/cuda.json" ;;
  esac || failed=1
done
exit $failed
