#!/usr/bin/env bash
# Builds build/bin/detrtrain (release; tests only with --tests). Further arguments go to cmake's configure step.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=OFF
if [ "${1:-}" = --tests ]; then
  tests=ON
  shift
fi
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING="$tests" -DCMAKE_COMPILE_WARNING_AS_ERROR=ON "$@" >build.log 2>&1 || { cat build.log; exit 1; }
cmake --build build
rm -f build.log
echo "build: $(pwd)/build/bin/detrtrain"
