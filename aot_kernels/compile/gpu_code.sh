#!/bin/sh
# Prints nvcc's flags for the GPUs to compile for: sh gpu_code.sh NVCC [ARCHS [PTX]]
# ARCHS lists the architectures to compile machine code for, as in "80 90". PTX, as in 75, lists the ones to compile PTX
# for, which a driver compiles for any later GPU. By default these are the GPUs at hand. Where there is none, it is PTX
# for the oldest GPUs that both nvcc and msops know: this compiles fastest, and runs on all.
nvcc=$1
archs=$2
ptx=$3

if [ -z "$archs$ptx" ]; then
  oldest=$(sed -n 's/^OLDEST_ARCH := //p' "$(dirname "$0")/flags.mk")
  known=
  for arch in $("$nvcc" --list-gpu-arch 2>/dev/null | sed -n 's/^compute_//p' | sort -n); do
    [ "$arch" -ge "$oldest" ] && known="$known $arch"
  done
  for gpu in $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sed -n 's/^\([0-9]*\)\.\([0-9]\)$/\1\2/p' | sort -un); do
    below=
    for arch in $known; do
      [ "$arch" -le "$gpu" ] && below=$arch
    done
    case " $archs $ptx $below" in
      *" $below "*) ;;
      *" $gpu") archs="$archs $gpu" ;;
      *) ptx="$ptx $below" ;; # nvcc is older than this GPU
    esac
  done
  set -- $archs $ptx $known "$oldest"
  [ -n "$archs$ptx" ] || ptx=$1
fi

flags=
for arch in $archs; do
  # sm_90a, from CUDA 12 on, is sm_90 with instructions that no later GPU has.
  if [ "$arch" = 90 ] && "$nvcc" --dryrun -arch=sm_90a -x cu /dev/null >/dev/null 2>&1; then
    arch=90a
  fi
  flags="$flags -gencode=arch=compute_$arch,code=sm_$arch"
done
for arch in $ptx; do
  flags="$flags -gencode=arch=compute_$arch,code=compute_$arch"
done
set -- $flags
# From CUDA 11.2 on, nvcc compiles for several GPUs at once.
if [ $# -gt 1 ] && "$nvcc" --help | grep -q -e --threads; then
  flags="$flags --threads=0"
fi
echo $flags
