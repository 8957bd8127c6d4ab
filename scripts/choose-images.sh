#!/usr/bin/env bash
# Prints the base images as BASE_IMAGE=… BUILD_IMAGE=… REDIS_IMAGE=…: those of the environment or
# .env, or the defaults, if all of them exist locally or can be pulled. Otherwise prints local
# images, which are built if they are missing or out of date.
#
#   export $(scripts/choose-images.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
local_base=quire-base:local
local_compiler=quire-compiler:local
local_build=quire-build:local

setting() { # NAME DEFAULT
  local in_file=
  [[ ! -f .env ]] || in_file=$(sed -n "s/^$1=//p" .env | tail -n 1)
  local value=${!1:-$in_file}
  echo "${value:-$2}"
}

is_here() { docker image inspect "$1" >/dev/null 2>&1; }

# Whether an image exists that the present script made.
is_current() {
  local made_by
  made_by=$(docker image inspect --format '{{index .Config.Labels "quire.made-by"}}' "$1" 2>&1) \
    && [[ $made_by == "$(sha256sum <scripts/make-base-image.sh | cut -c -64)" ]]
}

is_available() { is_here "$1" || timeout 300 docker pull --quiet "$1" >&2; }

base=$(setting BASE_IMAGE python:3.11-slim)
build=$(setting BUILD_IMAGE "$base")
redis=$(setting REDIS_IMAGE redis:7)
if ! { is_available "$base" && is_available "$build" && is_available "$redis"; }; then
  echo "Some of $base, $build and $redis cannot be pulled: using local images." >&2
  base=$local_base build=$local_build redis=$local_base
fi
# Also if they were requested by name: their wheels must match the present requirements.
[[ $base != "$local_base" ]] || is_current "$base" || scripts/make-base-image.sh "$base" >&2
if [[ $build == "$local_build" ]]; then
  is_current "$local_compiler" || scripts/make-base-image.sh "$local_compiler" g++ >&2
  scripts/make-build-image.sh "$local_compiler" "$build" >&2
fi
echo "BASE_IMAGE=$base BUILD_IMAGE=$build REDIS_IMAGE=$redis"
