#!/usr/bin/env bash
# Compare every plan file of this branch with that of a base revision; Markdown to a file, annotations to the log.
# usage: plan-diff.sh BASE OUTPUT.md [GATE ...]     exits with 1 when a gate fails, and with more on an error
# Plans that are removed, or whose model, hardware or other source is no longer the one that they were made for, fail
# with any gates. RULES=FILE names severities of your own, such as a line `plan-removed: info`.
set -uo pipefail
base=$1 output=$2
shift 2
gates=("$@")
[ "${#gates[@]}" -gt 0 ] || gates=(default)
options=(${RULES:+--rules "$RULES"})
for gate in "${gates[@]}"; do options+=("--fail-on=$gate"); done
rm -f -- "$output"
exec shardplan diff "${options[@]}" --format github "--comment=$output" -- "$base"
