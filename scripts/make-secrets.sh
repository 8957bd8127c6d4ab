#!/usr/bin/env bash
# Creates the file with Redis' password for docker-compose.yml, unless it exists: REDIS_PASSWORD_FILE
# of the environment or .env, by default secrets/redis-password.
#
# Only the owner can enter the file's folder. The file itself is readable to all users, because
# Redis and the scheduler read it as others: a container gets the file, not its folder.
set -euo pipefail
cd "$(dirname "$0")/.."

# The value in .env as Compose reads it: in quotes, or up to a comment.
value_in_file() {
  [[ ! -f .env ]] || tr -d '\r' <.env \
    | sed -nE 's/^(export +)?REDIS_PASSWORD_FILE *= *//p' | tail -n 1 \
    | sed -E "s/^\"([^\"]*)\".*/\1/; t; s/^'([^']*)'.*/\1/; t; s/ +(#.*)?\$//"
}

in_file=$(value_in_file)
file=${REDIS_PASSWORD_FILE:-${in_file:-secrets/redis-password}}
# Compose replaces a leading ~ itself.
[[ $file != "~/"* ]] || file=$HOME/${file#"~/"}
if [[ -d $file ]]; then
  echo "$file is a folder: remove it, or name a file in REDIS_PASSWORD_FILE" >&2
  exit 1
fi
[[ ! -s $file ]] || exit 0

folder=$(dirname "$file")
[[ -d $folder ]] || install --directory --mode=700 "$folder"
if [[ $(stat --format=%a "$folder") != *00 ]]; then
  echo "$folder can be entered by other users: chmod 700 it, or choose another folder for $file" >&2
  exit 1
fi
password=$(od --address-radix=n --read-bytes=32 --format=x1 /dev/urandom | tr -d ' \n')
(umask 077 && echo "$password" >"$file.new")
chmod 444 "$file.new"
mv "$file.new" "$file"
echo "Created $file: Redis' password."
