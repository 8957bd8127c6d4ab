#!/usr/bin/env bash
# Fails if the public protos break clients of the last tag: scripts/check-breaking.sh BUF
# Succeeds, and says so, in a clone without tags.
set -euo pipefail
buf=$(realpath "$1")
cd "$(dirname "$0")/.."

if ! tag=$(git describe --tags --abbrev=0 2>&1); then
  echo 'There is no tag to compare the protos with.'
  exit
fi
tagged=$(mktemp -d)
trap 'rm -rf "$tagged"' EXIT
git archive "$tag" protos buf.yaml | tar -x -C "$tagged"
"$buf" breaking --against "$tagged"
echo "The protos do not break clients of $tag."
