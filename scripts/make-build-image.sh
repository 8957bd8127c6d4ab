#!/usr/bin/env bash
# Builds a build image for containers that cannot reach a package index: BASE with the wheels of all
# services, downloaded by this host's pip, and a pip configuration that uses only these wheels.
# Does nothing if IMAGE was built from the same requirements and BASE.
#
#   scripts/make-build-image.sh BASE IMAGE        (TORCH=torch==… for another than the pinned one)
#
# The wheels fit the Python that downloads them, so this host's must have the version of BASE's:
# Debian's own, if BASE is from make-base-image.sh on the same release (PYTHON=… selects another).
set -euo pipefail
base=$1
image=$2
python=${PYTHON:-/usr/bin/python3}
cd "$(dirname "$0")/.."

requirements() {
  echo "${TORCH:-$(sed -n 's/^ARG PINNED_TORCH=//p' Dockerfile)}"
  echo wheel
  for name in gateway scheduler tracing kubernetes worker build-system; do
    # As in the CPU images, without Triton.
    "$python" scripts/requirements.py "$name" | grep -v ^triton
  done
}

made_of=$({ requirements; docker image inspect --format '{{.Id}}' "$base"; } | sha256sum)
made_of=${made_of%% *}
has=$(docker image inspect --format '{{index .Config.Labels "quire.made-of"}}' "$image" 2>&1) || true
if [[ $has == "$made_of" ]]; then
  echo "$image is up to date"
  exit
fi

here=$("$python" --version)
there=$(docker run --rm "$base" python3 --version)
if [[ $here != "$there" ]]; then
  echo "Python versions differ: $python is $here, $base has $there" >&2
  exit 1
fi

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
requirements >"$context/requirements.txt"
"$python" -m venv "$context/venv"
"$context/venv/bin/pip" wheel --quiet \
  --wheel-dir "$context/wheels" -r "$context/requirements.txt"
printf '[global]\nno-index = true\nfind-links = /wheels\n' >"$context/pip.conf"
cat >"$context/Dockerfile" <<DOCKERFILE
FROM $base
LABEL quire.made-of=$made_of
COPY pip.conf /etc/pip.conf
COPY wheels /wheels
DOCKERFILE
printf '*\n!pip.conf\n!wheels\n' >"$context/.dockerignore"
docker build --quiet --tag "$image" "$context"
docker image ls "$image"
