#!/usr/bin/env bash
# Post the comment of a check, or edit the one that an earlier run posted; nothing is posted first where nothing moved.
# Needs: GH_TOKEN, REPOSITORY (owner/name) and NUMBER (of the pull request), and GitHub's own `gh`.
set -euo pipefail
marker='<!-- meshwright check -->'
comments="repos/$REPOSITORY/issues/$NUMBER/comments"
earlier=$(gh api --paginate "$comments" --jq ".[] | select(.body | startswith(\"$marker\")) | .id" | head -n 1)
if [[ -s comment.md ]]; then
    body=$(cat comment.md)
elif [[ -n $earlier ]]; then
    body=$(printf '%s\nEvery budget is within, and nothing moved by more than 0.1 %%.\n' "$marker")
else
    exit 0
fi
if [[ -n $earlier ]]; then
    gh api --method PATCH "repos/$REPOSITORY/issues/comments/$earlier" -f body="$body" >/dev/null
else
    gh api --method POST "$comments" -f body="$body" >/dev/null
fi
