#!/usr/bin/env bash
# Train the runs of one row of a page's rows.txt on one processor core. Run it again to continue unfinished runs.
#
#     CORE=1 docs/results/row.sh PAGE ROW RUNS [OPTIONS]
#
# PAGE: a folder next to this file with a rows.txt, such as local_steps; its row `common` has the options of all rows.
# RUNS: folder of all rows' runs. OPTIONS: of `jgc compare` or `jgc sweep`, e.g. --data-dir DATA; they come last.
set -euo pipefail
cd "$(dirname "$0")/../.."
page=${1:?a folder of docs/results} row=${2:?a name of its rows.txt} runs=${3:?a folder for the runs}
shift 3
rows=docs/results/$page/rows.txt
if [ ! -f "$rows" ]; then
    echo "error: no $rows" >&2
    exit 2
fi
read -ra common <<<"$(awk '$1 == "common"' "$rows")"
read -ra words <<<"$(awk -v row="$row" '$1 == row && row != "common"' "$rows")"
if [ ${#words[@]} -eq 0 ]; then
    echo "error: no row $row in $rows" >&2
    exit 2
fi
export JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1 # a step's buffers in huge pages: otherwise page faults take a quarter of its time
# YNNPACK gets a matrix product together with the operations around it: a fifth less time for a step of a GPT
T=LIBRARY_FUSION_TYPE
export XLA_FLAGS="--xla_cpu_multi_thread_eigen=false --xla_cpu_experimental_ynn_fusion_type=${T}_DOT,${T}_REDUCE,${T}_INDIVIDUAL_CONVOLUTION"
exec taskset -c "${CORE:-1}" python -m jgc "${words[1]}" "${common[@]:1}" --run-dir "$runs/$row" "${words[@]:2}" "$@"
