#!/usr/bin/env bash
# Prints the base images as BASE_IMAGE=… BUILD_IMAGE=… REDIS_IMAGE=…: those of the environment or
# .env, or the defaults, if all of them exist locally or can be pulled. Otherwise prints local
# images, which are built if they are missing or out of date, with TORCH of the same places.
#
# With --save, images that Compose would not use by itself are also written to .env, which Compose
# reads, between two marked lines at the end. Other lines of .env are kept. The next choice ignores
# these lines, and removes those that are not needed any more. A variable of the environment applies
# to one call: its line is neither written nor removed.
#
#   export $(scripts/choose-images.sh)
set -euo pipefail
cd "$(dirname "$0")/.."
local_base=quire-base:local
local_compiler=quire-compiler:local
local_build=quire-build:local

first_line='# Written by `make up`: images that replace those that cannot be pulled.'
last_line='# End of the lines that `make up` writes.'

# The lines of .env that this script did not write. If an end is missing, no other line is lost.
own_lines() {
  [[ ! -f .env ]] || sed -E "/^$first_line\$/,/^$last_line\$/{
    /^($first_line|$last_line)\$/d; /^(BASE|BUILD|REDIS)_IMAGE=/d
  }" .env
}

saved_lines() { [[ ! -f .env ]] || sed -n "/^$first_line\$/,/^$last_line\$/p" .env; }

# The value of a variable in lines of .env, which may be quoted; the last one counts.
value_in() { # NAME
  sed -nE "s/^(export +)?$1=[\"']?([^\"' #\r]*).*/\2/p" | tail -n 1
}

setting() { # NAME DEFAULT
  local in_file
  in_file=$(own_lines | value_in "$1")
  local value=${!1:-$in_file}
  echo "${value:-$2}"
}

# The line that makes Compose use an image; nothing if it does so by itself.
line_for() { # NAME CHOSEN DEFAULT
  if [[ -n ${!1:-} ]]; then
    saved_lines | grep "^$1=" || true
  elif [[ $2 != "$(setting "$1" "$3")" ]]; then
    echo "$1=$2"
  fi
}

save() {
  local lines
  lines=$(
    line_for BASE_IMAGE "$base" python:3.11-slim
    line_for BUILD_IMAGE "$build" python:3.11-slim
    line_for REDIS_IMAGE "$redis" redis:7
  )
  [[ -n $lines || -n $(saved_lines) ]] || return 0
  local own file new
  own=$(own_lines)
  # The file itself, so that a link to it stays one.
  file=$(readlink --canonicalize-missing .env)
  new=$(mktemp "$file.XXXXXX")
  # An existing one may have secrets; a new one has none, and other users may run Compose.
  if [[ -f $file ]]; then
    cp --attributes-only --preserve=mode,ownership "$file" "$new"
  else
    chmod 644 "$new"
  fi
  {
    [[ -z $own ]] || printf '%s\n' "$own"
    [[ -z $lines ]] || printf '%s\n' "$first_line" "$lines" "$last_line"
  } >"$new"
  mv "$new" "$file"
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
  TORCH=$(setting TORCH '') scripts/make-build-image.sh "$local_compiler" "$build" >&2
fi
[[ ${1:-} != --save ]] || save
echo "BASE_IMAGE=$base BUILD_IMAGE=$build REDIS_IMAGE=$redis"
