#!/bin/sh
# Prints the path of the C++ compiler for nvcc's host code: sh host_compiler.sh NVCC [CXX]
# The compiler is CXX if that is given, else g++, or the newest installed g++-N that this nvcc accepts. If there is
# none, the script fails, and a line on stderr says what to install.
nvcc=$1
cxx=$2

takes() {
  compiler=$(command -v "$1") && said=$("$nvcc" -ccbin "$compiler" -E -x cu /dev/null 2>&1 >/dev/null) && echo "$compiler"
}

if ! command -v "$nvcc" >/dev/null; then
  echo "there is no $nvcc, which NVCC names" >&2
  exit 1
fi
said=
takes "${cxx:-g++}" && exit
limit=$(echo "$said" | sed -nE 's/.*versions later than ([0-9]+) are not supported.*/\1/p' | head -n 1)
reason=$(echo "$said" | grep -m 1 -iE 'error|fatal|unsupported' || echo "$said" | head -n 1)
if [ -z "$cxx" ]; then
  for version in 15 14 13 12 11 10 9 8 7; do
    takes "g++-$version" && exit
  done
fi
if [ -n "$limit" ]; then
  echo "$nvcc takes GCC up to $limit, and ${cxx:-g++} is newer: install g++-$limit (Debian: apt install g++-$limit)${cxx:+ and set CXX=g++-$limit}" >&2
elif command -v "${cxx:-g++}" >/dev/null; then
  echo "$nvcc does not take ${cxx:-g++} for its host code: $reason" >&2
elif [ -n "$cxx" ]; then
  echo "there is no $cxx, which CXX names" >&2
else
  echo "there is no g++ for the host code of $nvcc (Debian: apt install g++)" >&2
fi
exit 1
