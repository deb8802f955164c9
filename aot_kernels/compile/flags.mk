# All compile commands take these flags. The Makefile includes this file; msops.load reads its lines NAME := WORDS.

FLAGS := -std=c++17 -O3
# A function that ends without its `return` would go on with whatever code follows it.
HOST_FLAGS := -fPIC -fopenmp -fno-trapping-math -fvisibility=hidden -Wall -Wextra -Werror=return-type
# These come after HOST_FLAGS on x86-64. MindSpore 2.10 needs AVX2, too: without it, its matrix product ends the process.
HOST_FLAGS_x86_64 := -mavx2 -mfma -mf16c
# GPU code may call constexpr functions, such as std::max. A call of any other host function has no code on the GPU. It
# is an error here, where nvcc's default is a warning and a kernel that stores nothing. Warning 1675 is about pragmas of
# GCC, such as that of MSOPS_UNROLL, which nvcc hands on.
NVCC_FLAGS := --expt-relaxed-constexpr -Werror=cross-execution-space-call -Wno-deprecated-gpu-targets -Xcudafe --diag_suppress=1675
# The kernels use what GPUs have from this architecture on.
OLDEST_ARCH := 70
