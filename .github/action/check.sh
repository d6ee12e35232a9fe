#!/usr/bin/env bash
# Run the check of action.yml, and leave what it writes in $OUT. The status is that of the check.
set -uo pipefail
mkdir -p "$OUT"
cp "$ACTION_FOLDER/.github/action/post.sh" "$OUT/post.sh"
words=(check --comment "$OUT/comment.md" --sarif "$OUT/check.sarif" --junit "$OUT/check.xml")
if [[ -n ${AGAINST:-} ]]; then words+=(--against "$AGAINST"); fi
if [[ -n ${FILE:-} ]]; then words+=(--file "$FILE"); fi
python -m meshwright "${words[@]}"
status=$?
if [[ -n ${GITHUB_OUTPUT:-} ]]; then echo "status=$status" >>"$GITHUB_OUTPUT"; fi
exit $status
