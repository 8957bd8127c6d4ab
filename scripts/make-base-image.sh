#!/usr/bin/env bash
# Builds a base image for the Dockerfile and docker-compose.yml without an image registry: Debian
# with Python and Redis, by debootstrap from the Debian mirror of this host.
#
#   scripts/make-base-image.sh [IMAGE [PACKAGES]]     (as root; default quire-base:local)
#
# Then: BASE_IMAGE=quire-base:local REDIS_IMAGE=quire-base:local docker-compose up --build
set -euo pipefail

image=${1:-quire-base:local}
suite=bookworm
# Additional packages, separated by commas, such as g++ for a build image.
packages=ca-certificates,python3,python3-venv,redis-server${2:+,$2}

# The first Debian mirror of this host, from either format of apt's sources.
mirror=$(awk '
  $1 == "URIs:" && $2 ~ /debian\/?$/ { print $2; exit }
  $1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /:\/\/.*debian\/?$/) { print $i; exit } }
' $(find /etc/apt -name '*.sources' -o -name '*.list' | sort -r) </dev/null)
mirror=${DEBIAN_MIRROR:-$mirror}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

debootstrap --variant=minbase --include="$packages" "$suite" "$root" ${mirror:+"$mirror"}
rm -rf "$root"/var/cache/apt/*.deb "$root"/var/cache/apt/archives/*.deb \
  "$root"/var/lib/apt/lists/* "$root"/usr/share/doc/* "$root"/usr/share/man/* \
  "$root"/usr/share/locale/*
# As in Redis' own image: its user, and the mount point of its data; a new volume takes its owner.
groupadd --root "$root" --gid 999 store
useradd --root "$root" --uid 999 --gid 999 --no-create-home --shell /usr/sbin/nologin store
install --directory --owner=999 --group=999 "$root/data"
tar -C "$root" -c . | docker import --change 'CMD ["bash"]' \
  --change "LABEL quire.made-by=$(sha256sum <"$0" | cut -c -64)" - "$image"
docker image ls "$image"
