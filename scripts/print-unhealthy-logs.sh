#!/bin/sh
# Prints the last log lines of each container of the project that has ended or is not healthy.
#
#   COMPOSE='docker compose' scripts/print-unhealthy-logs.sh
cd "$(dirname "$0")/.." || exit
lines=5
state='{{if .State.Running}}{{with .State.Health}}{{.Status}}{{end}}{{else}}{{.State.Status}}{{end}}'

# COMPOSE may have arguments. Restarting containers are among `all` alone.
for id in $(${COMPOSE:-docker compose} ps --all --quiet); do
  status=$(docker inspect --format "{{.Name}} $state" "$id") || continue
  case $status in
    # The one without a check is running.
    *' healthy' | *' ') ;;
    *)
      echo "${status#/}:"
      docker logs --tail "$lines" "$id" 2>&1 | sed 's/^/  /'
      ;;
  esac
done
