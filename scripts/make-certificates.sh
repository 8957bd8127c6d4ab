#!/usr/bin/env bash
# Makes an authority and certificates for TLS between clients, gateways, schedulers and workers.
#
#   scripts/make-certificates.sh [DIRECTORY [NAME...]]
#
# DIRECTORY, by default secrets/certificates, gets ca.pem, and NAME.pem and NAME-key.pem for each
# service and for clients. A service's certificate has the names under which Compose reaches it,
# localhost, 127.0.0.1, ::1, and NAME... (names or IP addresses). Run it again to renew the
# certificates: the authority is kept, and running services read the files again; Redis only after a
# command (docs/tls.md, Renew). Only the owner can enter DIRECTORY; its files are readable for the
# users of containers. Keep ca-key.pem secret.
set -euo pipefail

if [[ ${1:-} == -* ]]; then
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
directory=${1:-$(dirname "$0")/../secrets/certificates}
shift $(($# > 0))
days=${DAYS:-365}
umask 077
mkdir -p "$directory"
chmod 700 "$directory"
cd "$directory"

new_key() {
  openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null ||
    openssl ecparam -genkey -noout -name prime256v1 -out "$1"
}

if [[ ! -e ca.pem ]]; then
  new_key ca-key.pem
  openssl req -x509 -new -key ca-key.pem -days 3650 -subj "/CN=Quire authority" -out ca.pem \
    -addext "keyUsage=critical,keyCertSign,cRLSign"
fi

# What strict verification asks for, which is the default from Python 3.13 on.
strict=(
  "basicConstraints=critical,CA:FALSE"
  "keyUsage=critical,digitalSignature"
  "subjectKeyIdentifier=hash"
  "authorityKeyIdentifier=keyid"
)

# make_certificate NAME USAGE NAME_OR_ADDRESS...
make_certificate() {
  local name=$1 usage=$2 names="DNS:localhost,IP:127.0.0.1,IP:::1"
  shift 2
  for host in "$@"; do
    # Clients look for an IP address among those only.
    if [[ $host == *:* || $host =~ ^[0-9]+(\.[0-9]+){3}$ ]]; then
      names+=",IP:$host"
    else
      names+=",DNS:$host"
    fi
  done
  new_key "$name-key.pem.new"
  openssl req -new -key "$name-key.pem.new" -subj "/CN=$name" -out "$name.csr"
  openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days "$days" \
    -extfile <(printf '%s\n' "subjectAltName=$names" "extendedKeyUsage=$usage" "${strict[@]}") \
    -out "$name.pem.new" 2>/dev/null
  # In place: a container that has mounted a file sees no other one under its name.
  cat "$name-key.pem.new" >"$name-key.pem"
  cat "$name.pem.new" >"$name.pem"
  chmod 644 "$name.pem" "$name-key.pem"
  rm "$name.csr" "$name.pem.new" "$name-key.pem.new"
}

# Each service is a server, and a client of the next one. The health check of Redis is a client, too.
make_certificate gateway serverAuth,clientAuth gateway gateway-2 "$@"
make_certificate scheduler serverAuth,clientAuth scheduler scheduler-2 "$@"
make_certificate worker serverAuth worker "$@"
make_certificate redis serverAuth,clientAuth redis "$@"
make_certificate client clientAuth
chmod 644 ca.pem
echo "Made certificates in $PWD."
