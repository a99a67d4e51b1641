#!/bin/bash
# A one-node SLURM on this machine, and a table on it: a job array by `fedrepro plan --sbatch`.
#   tests/slurm.sh            needs root and Debian's packages slurmctld, slurmd and munge; exits 77 and says why elsewhere
# Everything lives in a temporary folder, and ends with it. fedrepro and its extra `sweep` must be on PATH.
set -euo pipefail
for program in slurmctld slurmd munged sbatch fedrepro; do
  command -v $program > /dev/null || { echo "skipped: $program is not installed"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "skipped: a SLURM of one's own needs root"; exit 77; }
root=$(cd "$(dirname "$0")/.." && pwd); home=$(mktemp -d); host=$(hostname -s)
end() {
  for pid in $(cat "$home"/*.pid 2> /dev/null); do kill "$pid" 2> /dev/null || true; done
  sleep 1; rm -rf "$home"
}
trap end EXIT
cd "$home"; mkdir munge state spool; chmod 700 munge
head -c 1024 /dev/urandom > munge/key; chmod 600 munge/key
munged --force --key-file=munge/key --socket="$home/munge/socket" --pid-file="$home/munged.pid" --log-file="$home/munge/log" --seed-file="$home/munge/seed"
cat > slurm.conf <<EOF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$home/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.pid
SlurmdPidFile=$home/slurmd.pid
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$(awk '/MemTotal/ {print int($2 / 1024) - 500}' /proc/meminfo) State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
EOF
export SLURM_CONF=$home/slurm.conf PYTHONPATH=$root OMP_NUM_THREADS=1 FEDREPRO_QUIET=1
slurmctld; sleep 2; slurmd
for i in $(seq 30); do sinfo -h -o %T | grep -q idle && break; sleep 1; done
sinfo -h -o %T | grep -q idle || { cat slurmctld.log slurmd.log; echo "the node did not come up"; exit 1; }

table="fedccfa/table2 --tier smoke --methods FedAvg,FedProx --seeds 1"
rows() { python - "$1" <<'EOF'
import json, sys
from pathlib import Path
from fedrepro import store
cost = ("wall_seconds", "peak_memory_mb")
for path in sorted(Path(sys.argv[1]).rglob("*.jsonl")):
    head, rows = store.read(path)
    print(path.name, json.dumps([{k: v for k, v in head.items() if k not in cost}, rows], sort_keys=True))
EOF
}
fedrepro run $table --results one --workers 1 --quiet > /dev/null
rows one > one.txt; test -s one.txt

fedrepro plan $table --results array --sbatch jobs.sh --hours 0.2 --jobs 2 > /dev/null
sed -i "s|^export OMP|export PYTHONPATH=$root OMP|" jobs.sh
sbatch --wait jobs.sh > /dev/null
rows array > array.txt; cmp one.txt array.txt; echo "job array of $(ls fedrepro-*.log | wc -l): the same files"
