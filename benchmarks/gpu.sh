#!/bin/sh
# All that a GPU is asked for at once: equality of the executors, their speed, one published cell with its time.
#   sh benchmarks/gpu.sh FOLDER [DATA]     results go to FOLDER; DATA holds Fashion-MNIST (default: $FEDREPRO_DATA)
set -u
out=${1:?folder for the results}; data=${2:-${FEDREPRO_DATA:-$HOME/.cache/fedrepro/data}}; failed=0
cd "$(dirname "$0")/.." && mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
export PYTHONPATH=$PWD FEDREPRO_DATA=$data
python benchmarks/equal.py --device cuda --json "$out/equality-cuda.json" || failed=1
python -m benchmarks --device cuda --json "$out/cuda.json" || failed=1
for how in stacked-graphs graphs; do
  mkdir -p "$out/$how"
  python -m fedrepro run fedccfa/table1 --tier paper --methods FedAvg --datasets "Fashion-MNIST, 20 clients" --seeds 1 \
    --device cuda --executor $how --results "$out/$how" || failed=1
done
exit $failed
