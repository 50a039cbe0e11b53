#!/usr/bin/env bash
# Compare every plan file of this branch with that of a base revision; Markdown to a file, annotations to the log.
# usage: plan-diff.sh BASE OUTPUT.md [GATE ...]     exits with 1 when a gate fails, and with more on an error
set -uo pipefail
base=$1 output=$2
shift 2
gates=("$@")
[ "${#gates[@]}" -gt 0 ] || gates=(step_time:+3% peak_memory:95% error)
options=()
for gate in "${gates[@]}"; do options+=(--fail-on "$gate"); done
worst=0
: > "$output"
while IFS= read -r plan; do
  [ -f "$plan" ] || continue
  if ! git cat-file -e "$base:$plan" 2> /dev/null; then
    echo "::notice file=$plan,title=shardplan::new plan, nothing to compare it with"
    continue
  fi
  shardplan diff "$base:$plan" "$plan" "${options[@]}" --format github
  code=$?
  [ "$code" -gt "$worst" ] && worst=$code
  [ -s "$output" ] && shardplan diff "$base:$plan" "$plan" --format markdown | sed '1d' >> "$output"
  [ -s "$output" ] || shardplan diff "$base:$plan" "$plan" "${options[@]}" --format markdown >> "$output"
done < <(git ls-files -- '*.plan.json')
[ -s "$output" ] || rm -f "$output"
exit "$worst"
