#!/usr/bin/env bash
# Makes ranks die, hang, lie and run out of things, and checks that the job ends as promised (tests/torture; the rows are those of its --list).
#   scripts/torture.sh --seed 1 --trials 20 [--rows 1,6,9-12] [--binary build/bin/detrtrain] [--slack SECONDS] [--timeout SECONDS]
set -euo pipefail
exec python3 "$(dirname "$0")/../tests/torture/torture.py" "$@"
