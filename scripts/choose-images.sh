#!/usr/bin/env bash
# Prints the images to start from as BASE_IMAGE=… BUILD_IMAGE=… REDIS_IMAGE=…: those that the
# environment or .env asks for, else the ordinary ones, if they are here or a registry has them.
# Where they are not to be had, local ones, which are made if they are missing or out of date.
#
#   export $(TORCH=torch==… scripts/choose-images.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
local_base=quire-base:local
local_compiler=quire-compiler:local
local_build=quire-build:local

wanted() { # NAME DEFAULT
  local in_file=
  [[ ! -f .env ]] || in_file=$(sed -n "s/^$1=//p" .env | tail -n 1)
  local value=${!1:-$in_file}
  echo "${value:-$2}"
}

is_here() { docker image inspect "$1" >/dev/null 2>&1; }

to_be_had() { is_here "$1" || timeout 300 docker pull --quiet "$1" >&2; }

base=$(wanted BASE_IMAGE python:3.11-slim)
build=$(wanted BUILD_IMAGE "$base")
redis=$(wanted REDIS_IMAGE redis:7)
if ! { to_be_had "$base" && to_be_had "$build" && to_be_had "$redis"; }; then
  echo "Not all of $base, $build and $redis are to be had: local images take their place." >&2
  base=$local_base build=$local_build redis=$local_base
fi
# Whoever asked for them: their wheels have to be those that are required now.
[[ $base != "$local_base" ]] || is_here "$base" || scripts/make-base-image.sh "$base" >&2
if [[ $build == "$local_build" ]]; then
  is_here "$local_compiler" || scripts/make-base-image.sh "$local_compiler" g++ >&2
  scripts/make-build-image.sh "$local_compiler" "$build" >&2
fi
echo "BASE_IMAGE=$base BUILD_IMAGE=$build REDIS_IMAGE=$redis"
