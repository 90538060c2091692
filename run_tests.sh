#!/usr/bin/env bash
# The tests. Arguments go to pytest: ./run_tests.sh -k rot6d
set -euo pipefail
cd "$(dirname "$0")"
. ./venv.sh
export OMP_NUM_THREADS=1
exec "$PY" -m pytest -n 2 --dist worksteal "$@"
