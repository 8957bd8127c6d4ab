#!/usr/bin/env bash
# Makes the image that images are built in where a container reaches no package index: BASE with
# the wheels of all services, fetched by this host's pip, and a pip that looks nowhere else.
# Does nothing if IMAGE has been made of the same before.
#
#   TORCH=torch==… scripts/make-build-image.sh BASE IMAGE
#
# The wheels fit the Python that fetches them, so this host's must be BASE's: Debian's own, where
# BASE comes from make-base-image.sh on the same release (PYTHON=… names another).
set -euo pipefail
base=$1
image=$2
python=${PYTHON:-/usr/bin/python3}
cd "$(dirname "$0")/.."

requirements() {
  echo "${TORCH:-torch}"
  echo wheel
  for name in gateway scheduler worker build-system; do
    # As in the CPU images, without Triton.
    "$python" scripts/requirements.py "$name" | grep -v ^triton
  done
}

made_of=$({ requirements; docker image inspect --format '{{.Id}}' "$base"; } | sha256sum)
made_of=${made_of%% *}
has=$(docker image inspect --format '{{index .Config.Labels "quire.made-of"}}' "$image" 2>&1) || true
if [[ $has == "$made_of" ]]; then
  echo "$image has these wheels already"
  exit
fi

here=$("$python" --version)
there=$(docker run --rm "$base" python3 --version)
if [[ $here != "$there" ]]; then
  echo "$python is $here, but $base has $there" >&2
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
