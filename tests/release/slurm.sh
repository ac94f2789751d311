#!/bin/bash
# Try `lazyshards run` under SLURM: two nodes on this machine, the second with a host name and a /tmp of its own.
#
#     apt-get install slurm-wlm munge libpmix-dev
#     make .venv-cluster/.installed && tests/release/slurm.sh
#
# Wants root, for the namespaces. Everything lies in one folder, and ends with this script.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d /var/tmp/lazyshards-slurm.XXXXXX) # not in /tmp, which the nodes do not share
private=$(mktemp -d /tmp/lazyshards-node.XXXXXX)
trap 'kill $(cat "$work"/*.pid) 2>/dev/null || true; sleep 2; rm -rf "$work" "$private"' EXIT

host=$(hostname -s)
cat >"$work/slurm.conf" <<CONF
ClusterName=lazyshards
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/ctld.pid
SlurmdPidFile=$work/%n.pid
SlurmctldLogFile=$work/ctld.log
SlurmdLogFile=$work/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmix
ReturnToService=2
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17801 CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17802 CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES State=UP
CONF
export SLURM_CONF="$work/slurm.conf"
chmod 755 "$work"
mkdir "$work/state"
head -c 128 /dev/urandom >"$work/key" && chmod 600 "$work/key"
munged --force --key-file="$work/key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
  --log-file="$work/munged.log" --seed-file="$work/seed"
slurmctld
slurmd -N n1
unshare --mount --uts bash -c 'mount --make-rprivate / && mount -t tmpfs tmpfs /tmp && hostname node2 && slurmd -N n2'
for _ in $(seq 50); do [ "$(sinfo --noheader --states=idle --format=%D)" = 2 ] && break || sleep 0.2; done

python=$root/.venv-cluster/bin/python
"$python" - "$work/shards" "$private/shards" <<'PYTHON'
import sys
import numpy as np
import lazyshards
for path in sys.argv[1:]:
    lazyshards.write_shards(np.arange(40_000.0).reshape(10_000, 4), path, format="npy", rows_per_shard=1_500)
PYTHON
cat >"$work/script.py" <<'PYTHON'
import sys
import numpy as np
import lazyshards
from legate.core import get_legate_runtime
ds = lazyshards.open_shards(sys.argv[1], engine="legate")
whole = np.arange(40_000.0).reshape(10_000, 4)
assert np.array_equal(np.asarray(ds.compute()), whole)
assert np.array_equal(np.asarray(ds[9_000:100:-7].compute()), whole[9_000:100:-7])
batches = [np.asarray(batch) for batch in ds.batches(3_000, shuffle=True, seed=1)]
assert np.array_equal(np.sort(np.concatenate(batches)[:, 0]), whole[:, 0])
runtime = get_legate_runtime()
print(f"rank {runtime.node_id} of {runtime.node_count}: right", flush=True)
PYTHON
cat >"$work/job.sh" <<JOB
#!/bin/bash
source $root/.venv-cluster/bin/activate
cd $work
lazyshards run --nodes "\$SLURM_JOB_NUM_NODES" --ranks "\$SLURM_NTASKS_PER_NODE" --cpus 1 --sysmem 500 script.py "\$1"
JOB

submit() { # PATH: run the job on it, and print what it said
  sbatch --quiet --wait --nodes=2 --ntasks-per-node="$tasks" --time=5 --output="$work/said.txt" "$work/job.sh" "$1" || true
  cat "$work/said.txt"
}
for tasks in 1 2; do
  said=$(submit "$work/shards")
  for rank in $(seq 0 $((2 * tasks - 1))); do
    grep -q "rank $rank of $((2 * tasks)): right" <<<"$said" || { echo "$said"; exit 1; }
  done
  echo "2 nodes of $tasks rank(s): right on each"
done
tasks=1
said=$(submit "$private/shards")
[ "$(grep -c "RankMismatchError.*rank 1 (on node2)" <<<"$said")" = 2 ] || { echo "$said"; exit 1; }
echo "a path that only one node has: RankMismatchError on both, naming node2"
