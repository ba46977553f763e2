#!/usr/bin/env bash
# The runs of one row of rows.txt, on one processor core. The same line goes on with what is not finished.
#
#     CORE=1 docs/results/local_steps/row.sh ROW RUNS [OPTIONS]
#
# RUNS: folder of all rows' runs. OPTIONS: of `jgc compare` or `jgc sweep`, e.g. --data-dir DATA; they come last.
set -euo pipefail
cd "$(dirname "$0")/../../.."
row=${1:?a name of rows.txt} runs=${2:?a folder for the runs}
shift 2
read -ra words <<<"$(awk -v row="$row" '$1 == row' docs/results/local_steps/rows.txt)"
if [ ${#words[@]} -eq 0 ]; then
    echo "error: no row $row in docs/results/local_steps/rows.txt" >&2
    exit 2
fi
export JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 # a step's buffers in huge pages: else a quarter of its time goes into page faults
# YNNPACK gets a matrix product with the operations around it, not the product alone: a fifth of a step less
T=LIBRARY_FUSION_TYPE
export XLA_FLAGS="--xla_cpu_multi_thread_eigen=false --xla_cpu_experimental_ynn_fusion_type=${T}_DOT,${T}_REDUCE,${T}_INDIVIDUAL_CONVOLUTION"
exec taskset -c "${CORE:-1}" python -m jgc "${words[1]}" --workload ptb_gpt --run-dir "$runs/$row" "${words[@]:2}" "$@"
