#!/bin/sh
# Writes a stand-in for libc.so.6, which the linker shall see before libc: sh old_glibc.sh OUTPUT CXX
# glibc 2.34 moved functions of libpthread, libdl and librt to libc. It has them under two versions: the new one, which
# linkers choose, and the one they had before. The CUDA runtime calls some of them, so that a library linked in this way
# would load only with glibc 2.34 and later. The stand-in has each function whose code libc also has under an older
# version, under that version. So the library loads with the older glibc as well.
set -e
output=$1
libc=$("$2" -print-file-name=libc.so.6)
# Lines are: address, flags, section, size, version, name. Parentheses mark a version that linkers do not choose.
objdump --dynamic-syms "$libc" | awk '
$4 == ".text" && $(NF - 1) ~ /^\(/ { older[$1, $NF] = substr($(NF - 1), 2, length($(NF - 1)) - 2); next }
$4 == ".text" { chosen[$1, $NF] = $NF }
END {
  for (key in chosen) if (key in older) {
    print "old_" chosen[key] ": .globl old_" chosen[key]
    print ".type old_" chosen[key] ", @function"
    print ".symver old_" chosen[key] ", " chosen[key] "@@" older[key]
  }
}' > "$output.s"
(echo "NONE {};" && sed -n 's/.*@@\(.*\)/\1 {};/p' "$output.s" | sort -u) > "$output.versions"
as "$output.s" -o "$output.o"
ld -shared -soname libc.so.6 --version-script "$output.versions" "$output.o" -o "$output"
rm "$output.s" "$output.versions" "$output.o"
