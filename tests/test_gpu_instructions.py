"""Tests the headers of `common/gpu`: each compiles by itself and without a warning, and its functions are the
instructions whose names they have."""

import re
import shutil
import subprocess

import pytest

from child import ROOT

FOLDER = ROOT / "aot_kernels" / "common" / "gpu"
NVCC = shutil.which("nvcc")
pytestmark = [pytest.mark.wide, pytest.mark.skipif(not NVCC, reason="there is no nvcc")]
INSTRUCTIONS = {
    "mma_m16n8k16(sums, words, pair)": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma_m16n8k8(sums, words, pair)": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "pair[1] = cvt_rna_tf32(sums[0])": "cvt.rna.tf32.f32",
    "ldmatrix_x4(words, address)": "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "ldmatrix_x4_trans(words, address)": "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
    "cp_async<4>(shared, data)": "cp.async.ca.shared.global [%r1], [%rd1], 4;",
    "cp_async<16>(shared, data)": "cp.async.cg.shared.global [%r1], [%rd1], 16;",
    "cp_async<8>(shared, data, number > 0)": "cp.async.ca.shared.global [%r1], [%rd1], 8, %r2;",
    "cp_async<16>(shared, data, number > 0)": "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;",
    "cp_async_commit()": "cp.async.commit_group",
    "cp_async_wait<3>()": "cp.async.wait_group 3",
    "cp_async_wait_all()": "cp.async.wait_all",
    "cp_async_bulk_prefetch_L2(data, 64)": "cp.async.bulk.prefetch.L2.global",
    "mbarrier_init(address, number)": "mbarrier.init.shared.b64",
    "fence_mbarrier_init()": "fence.mbarrier_init.release.cluster",
    "fence_proxy_async()": "fence.proxy.async.shared::cta",
    "mbarrier_arrive(address)": "mbarrier.arrive.shared.b64",
    "mbarrier_arrive_expect_tx(address, number)": "mbarrier.arrive.expect_tx.shared::cta.b64",
    "mbarrier_wait(address, number)": "mbarrier.try_wait.parity.shared::cta.b64",
    "griddepcontrol_wait()": "griddepcontrol.wait",
    "griddepcontrol_launch_dependents()": "griddepcontrol.launch_dependents",
    "cluster_arrive_wait()": "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned",
    "cluster_arrive_relaxed()": "barrier.cluster.arrive.relaxed.aligned",
    "cluster_wait()": "barrier.cluster.wait.acquire.aligned",
    "sums[1] = ld_shared_cluster(shared, number).values[2]": "ld.shared::cluster.v4.f32",
    "st_async(sums[0], shared, address, number)": "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32",
    "tma_load_5d(address, address + 8, map, 1, 2, 3, 4, 5)": "cp.async.bulk.tensor.5d.shared::cluster.global.tile",
    "tma_load_5d_multicast(address, address + 8, map, 1, 2, 3, 4, 5, 3)": (
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
    ),
    "mbarrier_arrive_cluster(address, number)": "mbarrier.arrive.shared::cluster.b64",
    "wgmma_fence()": "wgmma.fence.sync.aligned",
    "wgmma_commit_group()": "wgmma.commit_group.sync.aligned",
    "wgmma_wait_group<2>()": "wgmma.wait_group.sync.aligned 2",
    "wgmma_m64n64k8(many, words, wgmma_matrix(address))": "wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32",
    "wgmma_k16<0>(columns<8>(table), wgmma_matrix(address), wgmma_matrix(address), number)": (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
    ),
    "wgmma_k16<1>(columns<16>(table), words, wgmma_transposed(address, 8192), number)": (
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"
    ),
    "wgmma_k16<1>(columns<32>(table), words, wgmma_transposed(address, 8192), number)": (
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16"
    ),
    "bar_sync(number, 64)": "bar.sync",
    "bar_arrive(number, 64)": "bar.arrive",
    "setmaxnreg_dec<24>()": "setmaxnreg.dec.sync.aligned.u32 24",
    "setmaxnreg_inc<384, 24, 240>()": "setmaxnreg.inc.sync.aligned.u32 240",
    "red_release_add(counter)": "red.release.gpu.global.add.u32",
    "number = ld_acquire(counter)": "ld.acquire.gpu.global.u32",
}

COLUMNS = """
template <int kN>
__device__ float (&columns(float (&table)[32][4]))[kN][4] {
  return reinterpret_cast<float (&)[kN][4]>(table);
}
"""


def compile_ptx(source, arch, folder):
    (folder / "source.cu").write_text(source)
    command = [NVCC, "-ptx", f"-arch={arch}", "-std=c++17", "-Werror=all-warnings", "-I", ROOT / "aot_kernels"]
    flags = ["--expt-relaxed-constexpr", "-Wno-deprecated-gpu-targets", "-Xcompiler", "-Wall,-Wextra"]
    done = subprocess.run(
        [*command, *flags, "source.cu", "-o", "out.ptx"], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return (folder / "out.ptx").read_text()


def kernels():
    for i, statement in enumerate(INSTRUCTIONS):
        yield f"""
__global__ void kernel{i}(float* data, unsigned* counter, int number, const __grid_constant__ TensorMap map) {{
  extern __shared__ float shared[];
  [[maybe_unused]] const unsigned address = shared_address(shared);
  uint32_t words[4] = {{counter[0], counter[1], counter[2], counter[3]}}, pair[2] = {{words[1], words[2]}};
  float sums[4] = {{data[0], data[1], data[2], data[3]}}, many[32], table[32][4];
  for (int i = 0; i < 32; ++i) many[i] = data[i];
  for (int i = 0; i < 128; ++i) table[i / 4][i % 4] = data[i];
  {statement};
  for (int i = 0; i < 32; ++i) data[i] = many[i];
  for (int i = 0; i < 128; ++i) data[i] += table[i / 4][i % 4];
  for (int i = 0; i < 4; ++i) data[i] += sums[i] + words[i] + pair[i % 2] + number;
}}"""


def source(body):
    headers = "".join(f'#include "common/gpu/{path.name}"\n' for path in sorted(FOLDER.glob("*.h")))
    return f"{headers}using namespace msops;\n{COLUMNS}{body}\n"


def test_functions_are_the_instructions_of_their_names(tmp_path):
    text = compile_ptx(source("".join(kernels())), "sm_90a", tmp_path)
    of_kernels = re.split(r"\.visible \.entry ", text)[1:]
    assert len(of_kernels) == len(INSTRUCTIONS)
    for ptx in of_kernels:
        i = int(re.match(r"\w*?kernel(\d+)", ptx)[1])
        statement, expected = list(INSTRUCTIONS.items())[i]
        inline = " ".join(re.findall(r"// begin inline asm\n(.*?)\n\t// end inline asm", ptx, re.DOTALL))
        # The compiler chooses the numbers of registers.
        pattern = re.sub(r"%\\?(rd?)1|%(r)2", lambda m: rf"%{m[1] or m[2]}\d+", re.escape(expected))
        assert re.search(pattern, inline), f"{statement}: no {expected} in\n{inline}"


def test_headers_compile_for_the_oldest_gpus(tmp_path):
    """Functions whose instruction those GPUs lack do nothing, and cause no warning."""
    compile_ptx(source("".join(kernels())), "sm_75", tmp_path)


@pytest.mark.parametrize("header", sorted(path.name for path in FOLDER.glob("*.h")))
def test_each_header_includes_what_it_needs(header, tmp_path):
    compile_ptx(f'#include "common/gpu/{header}"\n', "sm_75", tmp_path)
