#!/usr/bin/env bash
# The runs that are too large for two cores, on one GPU, in pieces of at most ten minutes.
#
#     docs/results/gpu.sh RUNS [OPTIONS]
#
# trains the first unfinished row of gpu/rows.txt for SECONDS_A_PIECE (540) and saves; run it again to continue.
# A benchmark cannot be resumed: if it takes longer it is passed over, like a row that fails, and the last lines name it.
# The most informative rows come first. RUNS: folder of all rows' runs. OPTIONS: of `jgc compare`,
# e.g. --data-dir DATA. ROWS="NAME NAME": only these. Exit status: 0 once all rows are finished or passed over, 1 if any
# of them failed, 75 if something is left.
set -euo pipefail
cd "$(dirname "$0")/../.."
runs=${1:?a folder for the runs}
shift
rows=docs/results/gpu/rows.txt
for row in ${ROWS:-}; do
    if ! grep -q "^$row " "$rows"; then
        echo "error: no row $row in $rows" >&2
        exit 2
    fi
done
mkdir -p "$runs"
wanted=$(awk -v wanted=" ${ROWS:-} " 'wanted ~ /^ *$/ || index(wanted, " " $1 " ")' "$rows")
left=$(while read -r name command; do
    [ -f "$runs/$name.done" ] || [ -f "$runs/$name.too-long" ] || [ -f "$runs/$name.failed" ] || echo "$name $command"
done <<<"$wanted")
marked() {
    while read -r name _; do if [ -f "$runs/$name.$1" ]; then echo "$name"; fi; done <<<"$wanted" | xargs
}
end() {
    passed=$(marked too-long)
    failed=$(marked failed)
    echo "all rows are finished${passed:+, but for $passed: delete its .too-long and give SECONDS_A_PIECE more}"
    [ -n "$failed" ] || exit 0
    echo "failed: $failed (delete its .failed to try again)"
    exit 1
}
[ -n "$left" ] || end
read -r name words <<<"$left"
echo "$name, and $(($(wc -l <<<"$left") - 1)) rows after it"
read -ra words <<<"${words//RUNS/$runs}"
[ "${words[0]}" = experiments ] || words=(jgc "${words[@]}")
if [ "${words[1]}" = compare ]; then
    words+=(--run-dir "$runs/$name" "$@")
fi
status=0
timeout --signal=TERM --kill-after=50 "${SECONDS_A_PIECE:-540}" python -m "${words[@]}" || status=$?
case $status in
0) touch "$runs/$name.done" ;;
124 | 137)
    if [ "${words[1]}" = compare ]; then
        echo "$name: saved, not finished; the same line goes on"
        exit 75
    fi
    touch "$runs/$name.too-long"
    echo "$name: not finished, passed over"
    ;;
2 | 130 | 143) exit $status ;; # the user's: no data, an option that does not exist; or stopped
*)
    touch "$runs/$name.failed"
    echo "$name: failed, passed over"
    ;;
esac
[ "$(wc -l <<<"$left")" = 1 ] || exit 75
end
