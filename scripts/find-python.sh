#!/bin/sh
# Prints the path of an interpreter of the given version (such as 3.12), from PATH or pyenv. Fails
# without one.
set -eu
for python in "$(command -v "python$1" || true)" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
  # pyenv has shims on PATH also for versions that are not selected; these fail.
  if [ -x "$python" ] && "$python" -c 'import sys, venv' 2>/dev/null; then
    "$python" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
exit 1
